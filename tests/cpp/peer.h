// Process 0 of two is under test, process 1 is the test: it writes the peer's messages into the other end of a socket.
#ifndef JAXMP_TESTS_PEER_H_
#define JAXMP_TESTS_PEER_H_

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "csrc/barrier/barrier.h"
#include "csrc/barrier/call_signature.h"
#include "csrc/barrier/messages.h"
#include "tests/cpp/check.h"

namespace jaxmp::tests {

using barrier::Kind;
using barrier::Message;

inline constexpr double kTimeout = 1.5;

inline std::pair<int, int> SocketPair() {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  return {ends[0], ends[1]};
}

class Peer {
 public:
  Peer() {
    const auto [ours, theirs] = SocketPair();
    fd_ = theirs;
    const timeval limit = {5, 0};  // of Next()
    CHECK_EQ(setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
    StartBarrier({0, 2, kTimeout});
    ConnectPeer(1, ours);
  }
  ~Peer() {
    StopBarrier();
    Close();
  }

  void Send(const Message& message) {
    const std::string bytes = Encode(message);
    CHECK_EQ(write(fd_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  void Come(const CallSignature& signature, uint64_t count, const std::vector<uint64_t>& tokens = {},
            uint64_t run = 0) {
    const std::vector<uint64_t> first = {1, 0};  // its device
    const std::vector<uint64_t> both = {0, 2, 1};
    Send({signature.has_tokens ? Kind::kArrival : Kind::kFirst,
          signature.members[0].place,
          signature.members[0].key,
          run,
          count,
          signature.digest,
          tokens.empty() ? first : tokens,
          signature.call + "\n" + signature.fields,
          both,
          {1, 1, ++ncome_}});
  }
  Message Next() {
    Message message;
    char buffer[4096];
    while (Decode(&bytes_, &message) != barrier::Decoded::kMessage) {
      const ssize_t got = read(fd_, buffer, sizeof(buffer));
      if (got <= 0) return {};
      bytes_.append(buffer, static_cast<size_t>(got));
    }
    return message;
  }
  bool HasHeard() const {
    char byte;
    return recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
  }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
  uint64_t ncome_ = 0;
  std::string bytes_;
};

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_PEER_H_
