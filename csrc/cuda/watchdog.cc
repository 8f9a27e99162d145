#include "csrc/cuda/watchdog.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"

namespace jaxmp::cuda {
namespace {

constexpr std::chrono::milliseconds kLongestPause(100);

// Never destroyed, because its thread outlives main.
class Watchdog {
 public:
  void Add(std::shared_ptr<Watch> watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (watches_.empty()) std::thread([this] { Serve(); }).detach();
    watches_.push_back(std::move(watch));
  }

 private:
  [[noreturn]] void Serve() {
    for (;;) {
      std::vector<std::shared_ptr<Watch>> watches;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        watches = watches_;
      }
      for (const std::shared_ptr<Watch>& watch : watches) {
        if (const std::string failure = watch->Poll(); !failure.empty()) End(failure);
      }
      const std::chrono::duration<double> limit(Timeout() / 4);
      std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(kLongestPause, limit));
    }
  }

  // Runs no destructors, because they would wait for the devices.
  [[noreturn]] static void End(const std::string& failure) {
    std::fprintf(stderr, "jaxmp.DistributedError: %s; ending the process\n", failure.c_str());
    std::_Exit(1);
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Watch>> watches_;
};

Watchdog& watchdog() {
  static auto* const only = new Watchdog;
  return *only;
}

}  // namespace

StatusOr<std::shared_ptr<Watch>> Watch::Make(abi::CUcontext context, std::string who, bool has_peers) {
  std::shared_ptr<Watch> watch(new Watch(context, std::move(who), has_peers));
  JAXMP_ASSIGN_OR_RETURN(watch->next_, MakeSpan());
  if (has_peers) watchdog().Add(watch);
  return watch;
}

StatusOr<Watch::Span> Watch::MakeSpan() {
  Span span;
  for (abi::CUevent* event : {&span.begin, &span.end}) {
    JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.EventCreate(event, abi::CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  }
  return span;
}

void Watch::Adopt(abi::ncclComm_t comm) {
  std::lock_guard<std::mutex> lock(mutex_);
  comm_ = comm;
}

Status Watch::Enter(std::shared_ptr<const std::string> call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const std::string failure = AskNccl(); !failure.empty()) {
    return FailedPrecondition("jaxmp.DistributedError: ", failure, "; start the process again");
  }
  call_ = std::move(call);
  limit_ = Timeout();
  entered_ = Clock::now();
  return {};
}

void Watch::Extend() {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = FirstTimeout();
}

void Watch::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  call_.reset();
}

// Records without the mutex: if the device is busy, the driver may hold this thread up, but the watchdog must go on.
Status Watch::Begin(abi::CUstream stream) {
  if (!has_peers_) return {};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    DropEnded();
    if (!next_.begin && !free_.empty()) {
      next_ = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!next_.begin) {
    JAXMP_ASSIGN_OR_RETURN(next_, MakeSpan());
  }
  return Check(Loaded()->driver.EventRecord(next_.begin, stream), "cuEventRecord");
}

Status Watch::End(abi::CUstream stream) {
  last_stream_ = stream;
  if (!has_peers_ && !changes_streams_) return {};
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.EventRecord(next_.end, stream), "cuEventRecord"));
  last_end_ = next_.end;
  if (!has_peers_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  next_.call = call_;
  next_.limit = limit_;
  spans_.push_back(std::exchange(next_, {}));
  return {};
}

Status Watch::Follow(abi::CUstream stream) {
  if (!last_stream_ || stream == last_stream_) return {};
  if (!has_peers_ && !changes_streams_) {
    // Calls without peers mostly stay on one stream, where events would be useless. From the first call that changes
    // streams on, every call records one. The last stream may be gone by now, so it is not asked for an event.
    changes_streams_ = true;
    return Check(Loaded()->driver.CtxSynchronize(), "cuCtxSynchronize");
  }
  if (!last_end_) return {};
  return Check(Loaded()->driver.StreamWaitEvent(stream, last_end_, 0), "cuStreamWaitEvent");
}

std::string Watch::AskNccl() const {
  if (!comm_) return "";
  abi::ncclResult_t state = abi::ncclSuccess;
  const abi::ncclResult_t asked = Loaded()->nccl.CommGetAsyncError(comm_, &state);
  if (asked != abi::ncclSuccess) state = asked;
  if (state == abi::ncclSuccess || state == abi::ncclInProgress) return "";
  return "NCCL reports " + Why(state) + " on " + who_;
}

std::string Watch::Late(const std::string& call, double limit, Clock::duration waited, const char* where) const {
  if (std::chrono::duration<double>(waited).count() <= limit) return "";
  std::ostringstream text;
  text << who_ << " has waited " << limit << " s " << where << " for its peers in the call " << call
       << "; a rank has ended, failed or gone another way (set JAXMP_TIMEOUT to wait longer)";
  return text.str();
}

void Watch::DropEnded() {
  while (!spans_.empty() && Loaded()->driver.EventQuery(spans_.front().end) == abi::CUDA_SUCCESS) {
    free_.push_back({spans_.front().begin, spans_.front().end, nullptr, 0, std::nullopt});
    spans_.pop_front();
  }
}

std::string Watch::PollDevice(Clock::time_point now) {
  const CurrentContext current(context_);
  DropEnded();
  if (spans_.empty()) return "";
  Span& span = spans_.front();
  // The time of a call counts from when the device reaches it: hours of other work may come before it in the stream.
  const Driver& driver = Loaded()->driver;
  if (!span.reached && driver.EventQuery(span.begin) == abi::CUDA_SUCCESS) span.reached = now;
  // A failed device reports to the code that waits for it; if the process is ending, no code waits.
  if (!span.reached || driver.EventQuery(span.end) != abi::CUDA_ERROR_NOT_READY) return "";
  if (const std::string failure = AskNccl(); !failure.empty()) return failure + ", in the call " + *span.call;
  return Late(*span.call, span.limit, now - *span.reached, "on the device");
}

std::string Watch::Poll() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (call_) {
    if (const std::string failure = AskNccl(); !failure.empty()) return failure + ", in the call " + *call_;
    if (std::string late = Late(*call_, limit_, now - entered_, "on the host"); !late.empty()) return late;
  }
  return PollDevice(now);
}

}  // namespace jaxmp::cuda
