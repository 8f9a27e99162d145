#include "csrc/barrier/peer.h"

namespace jaxmp::barrier {
namespace {

constexpr std::chrono::milliseconds kPingInterval(1000);
// A process that has not answered for this long is said not to answer.
constexpr std::chrono::milliseconds kSilent(3500);

}  // namespace

void Peer::Connect(int fd) {
  is_connected = true;
  heard = Clock::now();
  socket = Socket(fd);
  for (const Message& message : unsent) socket.Send(message);
  unsent.clear();
}

void Peer::Leave(const std::string& how) {
  if (!gone.empty()) return;
  gone = how;
  left = Clock::now();
  unsent.clear();
}

void Peer::Send(const Message& message) {
  if (socket.is_open()) {
    socket.Send(message);
  } else if (!is_connected && gone.empty()) {
    unsent.push_back(message);
  }
}

void Peer::Ping(Clock::time_point now) {
  if (!socket.is_open() || now - pinged <= kPingInterval) return;
  pinged = now;
  socket.Send(Message{});
}

bool Peer::IsSilent(Clock::time_point now) const { return socket.is_open() && now - heard > kSilent; }

std::string Peer::WhyMissing(Clock::time_point now) const {
  if (now - heard > kSilent) {
    return "has not come and does not answer: it is stopped, or its machine or network is gone";
  }
  return "has not come; it is alive, " +
         (last_call.empty() ? "and has come to no call yet" : "the last call it came to is " + last_call);
}

}  // namespace jaxmp::barrier
