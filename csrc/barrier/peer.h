// Another process of the job: its socket, and what is known of it.
#ifndef JAXMP_BARRIER_PEER_H_
#define JAXMP_BARRIER_PEER_H_

#include <chrono>
#include <string>
#include <vector>

#include "csrc/barrier/messages.h"

namespace jaxmp::barrier {

using Clock = std::chrono::steady_clock;

struct Peer {
  void Connect(int fd);
  void Leave(const std::string& how);

  // Waits for the connection, where there is none yet; is nothing to who has left.
  void Send(const Message& message);
  // Asks for a sign of life, once a second.
  void Ping(Clock::time_point now);
  bool IsSilent(Clock::time_point now) const;
  // Why it may have come to no call yet: "has not come; it is alive, ...".
  std::string WhyMissing(Clock::time_point now) const;

  bool is_wanted = false, is_connected = false;  // ever
  Socket socket{-1};
  std::vector<Message> unsent;  // until it is connected
  std::string gone;             // how it left; empty while it is there
  bool is_clean = false;
  Clock::time_point heard = Clock::now(), pinged = Clock::now(), left;
  std::string last_call;
};

}  // namespace jaxmp::barrier

#endif  // JAXMP_BARRIER_PEER_H_
