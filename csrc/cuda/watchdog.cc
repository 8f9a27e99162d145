#include "csrc/cuda/watchdog.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/cuda/context.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"

namespace jaxmp::cuda {
namespace {

constexpr std::chrono::milliseconds kLongestPause(100);
constexpr std::chrono::seconds kPatience(5);  // with what an abort ought to end
constexpr std::chrono::milliseconds kLook(10);

// Never destroyed: its thread outlives main.
class Watchdog {
 public:
  // False where everything was aborted already.
  bool Add(std::shared_ptr<Watch> watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return false;
    if (watches_.empty()) std::thread([this] { Serve(); }).detach();
    watches_.push_back(std::move(watch));
    return true;
  }

  std::string failure() {
    if (!has_failed_.load(std::memory_order_acquire)) return "";  // every call asks
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  void Serve() {
    for (;;) {
      std::vector<std::shared_ptr<Watch>> watches;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        watches = watches_;
      }
      for (const std::shared_ptr<Watch>& watch : watches) {
        if (const std::string failure = watch->Poll(); !failure.empty()) return AbortAll(failure);
      }
      const std::chrono::duration<double> limit(Timeout() / 4);
      std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(kLongestPause, limit));
    }
  }

  void AbortAll(const std::string& failure) {
    std::fprintf(stderr, "%s; all communicators of this process are aborted\n", failure.c_str());
    std::vector<std::shared_ptr<Watch>> watches;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failure_ = failure;  // first: calls that return because of the abort then know why
      has_failed_.store(true, std::memory_order_release);
      watches = watches_;
    }
    // Either step may itself wait: a launch for a driver that another thread holds, an abort for what it cannot end.
    const auto done = std::make_shared<std::atomic<int>>(0);
    std::thread steps;
    try {
      steps = std::thread([watches, done] {
        for (const std::shared_ptr<Watch>& watch : watches) watch->FailDevice();
        done->store(1);
        for (const std::shared_ptr<Watch>& watch : watches) watch->Abort();
        done->store(2);
      });
    } catch (const std::system_error& error) {
      End(std::string("no thread for the abort, ") + error.what());
    }
    // Each device takes up to kPatience to fail; they mostly fail at once.
    if (!Await(2 * kPatience, [&] { return done->load() >= 1; })) End("the driver does not let the devices fail");
    AwaitHosts(watches);
    if (Await(kPatience, [&] { return done->load() == 2; })) return steps.join();
    steps.detach();
  }

  // An abort of our communicator does not reach those that cuBLASMp has split off it, once they are made (NCCL 2.30,
  // ncclCommInitChildComm): who waits on the host in one of them stays there. Then there is only the process to end.
  static void AwaitHosts(const std::vector<std::shared_ptr<Watch>>& watches) {
    std::string call;
    const auto is_free = [&call](const std::shared_ptr<Watch>& watch) { return (call = watch->Waiting()).empty(); };
    const auto are_free = [&] { return std::all_of(watches.begin(), watches.end(), is_free); };
    if (!Await(kPatience, are_free)) End("the abort did not free " + call);
  }

  template <typename Condition>
  static bool Await(std::chrono::seconds limit, Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(kLook);
    }
    return true;
  }

  [[noreturn]] static void End(const std::string& why) {
    std::fprintf(stderr, "jaxmp: %s; ending the process\n", why.c_str());
    std::abort();
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Watch>> watches_;
  std::string failure_;  // guarded by mutex_
  std::atomic<bool> has_failed_{false};
};

// XLA has given its contexts back, or the driver is shutting down: the process is ending, and nobody waits any more.
bool IsGone(abi::CUresult result) {
  return result == abi::CUDA_ERROR_DEINITIALIZED || result == abi::CUDA_ERROR_INVALID_CONTEXT ||
         result == abi::CUDA_ERROR_INVALID_HANDLE || result == abi::CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

Watchdog& watchdog() {
  static auto* const only = new Watchdog;
  return *only;
}

}  // namespace

std::string Failure() { return watchdog().failure(); }

Status CheckAlive() {
  const std::string failure = Failure();
  if (failure.empty()) return {};
  return FailedPrecondition(failure + "; the communicators of this process were aborted, start it again");
}

StatusOr<std::shared_ptr<Watch>> Watch::Make(abi::CUcontext context, std::string who, bool has_peers) {
  std::shared_ptr<Watch> watch(new Watch(context, std::move(who), has_peers));
  for (abi::CUevent* event :
       {&watch->watched_.begin, &watch->watched_.end, &watch->latest_.begin, &watch->latest_.end}) {
    JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.EventCreate(event, abi::CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  }
  StatusOr<std::unique_ptr<const ContextFault>> fault =
      has_peers ? ContextFault::Make() : StatusOr<std::unique_ptr<const ContextFault>>(nullptr);
  if (fault.ok()) watch->context_fault_ = std::move(*fault);
  if (!watchdog().Add(watch)) return CheckAlive();
  return watch;
}

Status Watch::Adopt(abi::ncclComm_t comm) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    comm_ = comm;
  }
  const Status alive = CheckAlive();
  if (!alive.ok()) Abort();
  return alive;
}

void Watch::Enter(std::shared_ptr<const std::string> call) {
  std::lock_guard<std::mutex> lock(mutex_);
  call_ = std::move(call);
  entered_ = Clock::now();
}

void Watch::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  call_.reset();
}

Status Watch::Begin(abi::CUstream stream) {
  if (!has_peers_) return {};
  abi::CUevent event;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    latest_.state = State::kRecording;
    event = latest_.begin;
  }
  return Check(Loaded()->driver.EventRecord(event, stream), "cuEventRecord");
}

Status Watch::End(abi::CUstream stream) {
  if (!is_recorded()) {
    last_stream_ = stream;
    return {};
  }
  // While it is recording, the watchdog leaves the span alone.
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.EventRecord(latest_.end, stream), "cuEventRecord"));
  std::lock_guard<std::mutex> lock(mutex_);
  last_end_ = latest_.end;
  last_stream_ = stream;
  if (has_peers_) latest_.state = State::kQueued;
  latest_.call = call_;
  return {};
}

Status Watch::Follow(abi::CUstream stream) {
  if (!last_stream_ || stream == last_stream_) return {};
  if (!is_recorded()) {
    // Calls without peers mostly stay on one stream, and an event behind each would be for nothing. From the first that
    // does not, there is one. The last stream may be gone by now, so it is not asked for an event.
    changes_streams_ = true;
    return Check(Loaded()->driver.CtxSynchronize(), "cuCtxSynchronize");
  }
  if (!last_end_) return {};
  return Check(Loaded()->driver.StreamWaitEvent(stream, last_end_, 0), "cuStreamWaitEvent");
}

std::string Watch::Late(const std::string& call, const char* where) const {
  std::ostringstream text;
  text << "jaxmp: " << who_ << " has waited " << Timeout() << " s " << where << " for its peers in the call " << call
       << "; a rank has ended, failed or gone another way (set JAXMP_TIMEOUT to wait longer)";
  return text.str();
}

std::string Watch::PollHost(Clock::time_point now) const {
  const std::chrono::duration<double> waited = now - entered_;
  return call_ && waited.count() > Timeout() ? Late(*call_, "on the host") : "";
}

std::string Watch::PollDevice(Clock::time_point now) {
  if (watched_.state == State::kIdle && latest_.state == State::kQueued) std::swap(watched_, latest_);
  if (watched_.state == State::kIdle) return "";
  // The time of a call counts from when the device comes to it: ahead of it in the stream may be hours of other work.
  const Driver& driver = Loaded()->driver;
  const bool is_queued = watched_.state == State::kQueued;
  const abi::CUresult result = driver.EventQuery(is_queued ? watched_.begin : watched_.end);
  if (result == abi::CUDA_SUCCESS) {
    watched_.state = is_queued ? State::kRunning : State::kIdle;
    watched_.since = now;
    return "";
  }
  if (IsGone(result)) return "";
  if (result != abi::CUDA_ERROR_NOT_READY) {
    return "jaxmp: the device of " + who_ + " has failed (" + Why(result) + ") in or ahead of the call " +
           *watched_.call;
  }
  const std::chrono::duration<double> waited = now - watched_.since;
  return !is_queued && waited.count() > Timeout() ? Late(*watched_.call, "on the device") : "";
}

std::string Watch::Poll() {
  std::lock_guard<std::mutex> lock(mutex_);
  const CurrentContext current(context_);
  if (comm_) {
    abi::ncclResult_t state = abi::ncclSuccess;
    const abi::ncclResult_t asked = Loaded()->nccl.CommGetAsyncError(comm_, &state);
    if (asked != abi::ncclSuccess) state = asked;
    if (state != abi::ncclSuccess && state != abi::ncclInProgress) {
      return "jaxmp: NCCL reports " + Why(state) + " on " + who_;
    }
  }
  const Clock::time_point now = Clock::now();
  std::string late = PollHost(now);
  return late.empty() ? PollDevice(now) : late;
}

bool Watch::IsOnDevice(const Span& span) const {
  return span.state != State::kIdle && Loaded()->driver.EventQuery(span.end) == abi::CUDA_ERROR_NOT_READY;
}

std::string Watch::Waiting() {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_peers_ && call_ ? who_ + " from the host's part of the call " + *call_ : "";
}

void Watch::FailDevice() {
  const CurrentContext current(context_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!IsOnDevice(watched_) && !IsOnDevice(latest_)) return;
  }
  if (context_fault_ && context_fault_->Raise()) return;
  std::fprintf(stderr, "jaxmp: the device of %s cannot be made to fail; ending the process\n", who_.c_str());
  std::abort();
}

void Watch::Abort() {
  abi::ncclComm_t comm;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (!comm) return;
  const CurrentContext current(context_);
  (void)Loaded()->nccl.CommAbort(comm);
}

}  // namespace jaxmp::cuda
