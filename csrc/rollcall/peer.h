// Another process of the job: its socket, and what is known of it.
#ifndef JAXMP_ROLLCALL_PEER_H_
#define JAXMP_ROLLCALL_PEER_H_

#include <chrono>
#include <string>

#include "csrc/rollcall/wire.h"

namespace jaxmp::rollcall {

using Clock = std::chrono::steady_clock;

struct Peer {
  explicit Peer(int fd) : socket(fd) {}

  // Only where it is still there.
  void Send(const Message& message);
  // Asks for a sign of life, once a second.
  void Ping(Clock::time_point now);
  // Why it may have come to no call yet: "has not come; it is alive, ...".
  std::string WhyMissing(Clock::time_point now) const;

  Socket socket;
  std::string gone;  // how it left; empty while it is there
  bool is_clean = false;
  Clock::time_point heard = Clock::now(), pinged = Clock::now();
  std::string last_call;
};

}  // namespace jaxmp::rollcall

#endif  // JAXMP_ROLLCALL_PEER_H_
