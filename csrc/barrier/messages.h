// Messages between the processes of a job, and the sockets that carry them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxmp::barrier {

enum class Kind : uint8_t {
  kArrival,  // the sender has come to `key` for the count-th time in its run, with all its devices
  kFirst,    // the same, to a collective of XLA's, with the first of its devices
  kFailure,  // the sender has given up its run of the program; text says why
  kAbandon,  // the same, and the job may go on: a rank has left the run
  kPing,
  kPong,     // text: the sender's last call
  kGoodbye,  // the sender leaves; text says why
  kSummary,  // ranks: which arrivals of the circle the sender has
  kGone,     // ranks: those who have left, as text says; count is 1 if all is well with them
  kSilence,  // ranks: one that hears nothing from another, and the other; count is 0 once it does again
};

// The numbers are in the sender's byte order: a job has one kind of machine.
struct Message {
  Kind kind = Kind::kPing;
  uint64_t place = 0, key = 0, run = 0, count = 0, digest = 0;
  std::vector<uint64_t> tokens;  // of an arrival: device, token, device, token, ...
  std::string text;  // of an arrival: the call, a newline, its fields; empty where the receiver has seen the digest
  std::vector<uint64_t> members;  // of the circle, see circle.h; empty where there is none
  std::vector<uint64_t> ranks;    // of an arrival: who has come, see circle.h; of a failure: who has given up
};

std::string Encode(const Message& message);

// Takes the first message off `bytes`. kWrong: these bytes are not ours.
enum class Decoded { kMessage, kIncomplete, kWrong };
Decoded Decode(std::string* bytes, Message* message);

// A connected socket that never blocks: what it cannot send at once waits in it.
class Socket {
 public:
  explicit Socket(int fd);  // owns it; -1 is a socket that is closed
  ~Socket() { Close(); }
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  bool has_unsent() const { return !out_.empty(); }
  void Send(const Message& message);
  void Flush();
  // Appends what has come. False at the end of the stream, after which the socket is closed.
  bool Receive(std::vector<Message>* messages);
  void Close();

 private:
  int fd_;
  std::string in_, out_;
};

}  // namespace jaxmp::barrier
