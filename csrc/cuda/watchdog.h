// Watches the ranks of this process while they wait for others, and ends the process if a wait does not end.
//
// A thread polls every rank for a call that does not end, on the host (where it makes collective objects) or on its
// stream, and for an asynchronous error of NCCL meanwhile. Communicators that cuBLASMp has split off ours report their
// errors to no one. In either case the thread prints rank and call, and ends the process. It aborts no communicator,
// because their kernels would return, and code that waits for the stream would take garbage for a result.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cuda/abi.h"

namespace jaxmp::cuda {

// One rank's calls. Used by one thread at a time, and by the watchdog's thread.
class Watch {
 public:
  // `who` names the rank; without peers it waits for no one. The context must be current, here and in the calls below.
  static StatusOr<std::shared_ptr<Watch>> Make(abi::CUcontext context, std::string who, bool has_peers);

  // Asks the communicator for errors from now on.
  void Adopt(abi::ncclComm_t comm);

  // Enclose the host's part of a call, which may block in a collective; `call` describes it. Enter() returns an error
  // if the communicator got one while no call was waiting.
  Status Enter(std::shared_ptr<const std::string> call);
  void Leave();
  // Gives the current call the deadline of a first run.
  void Extend();

  // Enclose the device's part: everything that a call puts on the stream.
  Status Begin(abi::CUstream stream);
  Status End(abi::CUstream stream);

  // Makes the stream wait for everything that the last call put on another one.
  Status Follow(abi::CUstream stream);

  // For the watchdog: "", or the failure that a waiting call has met.
  std::string Poll();

 private:
  using Clock = std::chrono::steady_clock;

  // The events around one call on the stream.
  struct Span {
    abi::CUevent begin = nullptr, end = nullptr;
    std::shared_ptr<const std::string> call;
    double limit = 0;                          // seconds
    std::optional<Clock::time_point> reached;  // when the watchdog found the device in the call
  };

  Watch(abi::CUcontext context, std::string who, bool has_peers)
      : context_(context), who_(std::move(who)), has_peers_(has_peers) {}
  static StatusOr<Span> MakeSpan();
  std::string AskNccl() const;
  void DropEnded();
  std::string PollDevice(Clock::time_point now);
  std::string Late(const std::string& call, double limit, Clock::duration waited, const char* where) const;

  const abi::CUcontext context_;
  const std::string who_;
  const bool has_peers_;
  std::mutex mutex_;  // guards what the watchdog reads; never held in a collective
  abi::ncclComm_t comm_ = nullptr;
  std::shared_ptr<const std::string> call_;  // in its host part; null outside
  double limit_ = 0;                         // of call_, seconds
  Clock::time_point entered_;
  std::deque<Span> spans_;  // on the stream, in its order; none without peers
  std::vector<Span> free_;  // of calls that have ended
  // Used by the calling thread only.
  Span next_;                        // of the call that is being put on the stream
  abi::CUevent last_end_ = nullptr;  // of the last call, on last_stream_
  abi::CUstream last_stream_ = nullptr;
  bool changes_streams_ = false;
};

}  // namespace jaxmp::cuda
