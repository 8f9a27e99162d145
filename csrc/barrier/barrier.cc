#include "csrc/barrier/barrier.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/barrier/service.h"
#include "csrc/base/float_state.h"
#include "csrc/base/schedule_noise.h"

namespace jaxmp {
namespace {

using barrier::Clock;
using barrier::Message;
using barrier::Service;

// How long a handler may hold its thread: longer than messages take between ranks that come at the same time.
constexpr std::chrono::milliseconds kMoment(50);

// Never destroyed: its threads outlive main.
Service& service() {
  static auto* const the_service = new Service;
  return *the_service;
}

// The service, locked.
class Locked {
 public:
  Service* operator->() const { return &service_; }

 private:
  Service& service_ = service();
  const std::lock_guard<std::mutex> lock_{service_.mutex};
};

// A forked child has this process's sockets and none of its threads. It closes them, so that the peers see at once when
// this process ends, however long the child lives.
void ForgetInForks() {
  static const int registered = pthread_atfork([] { service().mutex.lock(); }, [] { service().mutex.unlock(); },
                                               [] {
                                                 service().is_running = false;
                                                 service().peers.clear();
                                                 service().mutex.unlock();
                                               });
  static_cast<void>(registered);
}

}  // namespace

void StartBarrier(const BarrierOptions& options) {
  const Locked s;
  s->options = options;
  s->peers.clear();
  s->wanted.clear();
  s->arrivals = barrier::ArrivalTracker(options.process);
  s->failure.clear();
  s->late_failure.reset();
  s->last_call.clear();
  if (pipe2(s->wake, O_CLOEXEC | O_NONBLOCK) != 0) s->wake[0] = s->wake[1] = -1;
  ForgetInForks();
  s->is_running = true;
  s->thread = std::thread([] { service().Serve(); });
}

void WantProcesses(const std::vector<int>& processes) {
  const Locked s;
  if (!s->is_running) return;
  for (int process : processes) s->Want(process);
}

std::vector<int> WantedProcesses() {
  Service& s = service();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.has_wanted.wait(lock, [&s] { return !s.wanted.empty() || !s.is_running; });
  if (!s.is_running) return {};
  return std::exchange(s.wanted, {});
}

void ConnectPeer(int process, int fd) {
  const Locked s;
  const bool is_other = process != s->options.process && process >= 0 && process < s->options.nprocesses;
  if (!s->is_running || !is_other || s->peers[process].is_connected || !s->peers[process].gone.empty()) {
    close(fd);
    return;
  }
  s->peers[process].Connect(fd);
  s->Wake();  // the thread has one more socket to read
}

void LosePeer(int process, const std::string& gone) {
  const Locked s;
  if (!s->is_running || s->peers[process].is_connected) return;
  s->peers[process].Leave(gone);
  s->Wake();
}

void LeaveBarrier(const std::string& reason) {
  const Locked s;
  Message goodbye;
  goodbye.kind = barrier::Kind::kGoodbye;
  goodbye.text = reason;
  for (auto& [process, peer] : s->peers) peer.Send(goodbye);
}

void ExpectCall(const CallSignature& signature) { Locked()->arrivals.Expect(signature); }

void StopBarrier() {
  std::vector<barrier::Resumed> settled;
  {
    const Locked s;
    if (!s->is_running) return;
    s->is_running = false;
    const Status stopped = FailedPrecondition("jaxmp.distributed was shut down");
    for (barrier::Waiting& waiting : s->waiting) {
      const auto* failed = s->arrivals.failure(waiting.arrival);
      settled.push_back({std::move(waiting.done),
                         failed ? FailedPrecondition("jaxmp.DistributedError: ", failed->text) : stopped,
                         {}});
    }
    s->waiting.clear();
  }
  service().Resume(std::move(settled));
  service().has_wanted.notify_all();
  service().Wake();
  service().thread.join();
  const Locked s;
  s->peers.clear();
  for (int& fd : s->wake) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

namespace {

// Like ArriveWithToken. Returns the arrival if its outcome is not known yet.
std::optional<barrier::Arrival> Come(const std::shared_ptr<const CallSignature>& signature, const Origin& origin,
                                     int64_t position, uint64_t token, barrier::Done done) {
  if (position < 0 || position >= static_cast<int64_t>(signature->groups.size())) {
    done(InvalidArgument(signature->call, ": the mesh has no position ", position), {});
    return std::nullopt;
  }
  // Restores the caller's float state: waiting ranks resume on our threads, the last rank continues on its own.
  const barrier::Done resume = [state = FloatState::Current(), done = std::move(done)](
                                   const Status& status, const std::vector<uint64_t>& tokens) {
    const ScopedFloatState scope(state);
    done(status, tokens);
  };
  AddScheduleNoise();
  const auto at = static_cast<size_t>(position);
  const int last = signature->members[static_cast<size_t>(signature->groups[at])].processes.back();
  std::optional<Status> outcome;
  std::vector<uint64_t> tokens;
  {
    const Locked s;
    if (!s->is_running) {
      outcome = FailedPrecondition(signature->call, ": jaxmp.distributed was shut down");
    } else if (s->late_failure) {
      outcome = s->late_failure;
    } else if (last >= s->options.nprocesses) {
      outcome = InvalidArgument(signature->call, ": a group names process ", last, " of ", s->options.nprocesses);
    } else if (signature->has_tokens && s->arrivals.IsAmbiguous(*signature, at, origin)) {
      outcome = FailedPrecondition(signature->call,
                                   ": two instructions of the compiled program have the number of this call, so that "
                                   "ranks cannot tell their operands apart; JAXMP_SHARED_MEMORY=off does without it");
    } else {
      const barrier::Arrival arrival = s->arrivals.Arrive(signature, origin, at, token);
      for (int process : arrival.members().processes) s->Want(process);
      s->last_call = signature->call;
      if (const std::optional<Message> news = s->arrivals.Announcement(arrival)) s->Send(arrival, *news);
      outcome = s->Outcome(arrival);
      if (!outcome) {
        s->waiting.push_back({arrival, Clock::now(), resume});
        if (s->waiting.size() == 1) s->Wake();  // the thread has a deadline to watch from now on
        return arrival;
      } else {
        if (outcome->ok()) tokens = s->arrivals.TakeTokens(arrival);
        if (signature->has_tokens && !s->waiting.empty()) s->Wake();  // others may have waited for this one alone
      }
    }
  }
  resume(*outcome, tokens);
  return std::nullopt;
}

}  // namespace

void ArriveWithToken(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position,
                     uint64_t token, std::function<void(const Status&, const std::vector<uint64_t>&)> done) {
  Come(signature, origin, position, token, std::move(done));
}

Status ArriveForAMoment(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable is_over;
    std::optional<Status> outcome;
    bool has_gone_on = false;
  };
  const auto wait = std::make_shared<Wait>();
  const auto waiting = Come(signature, origin, position, 0, [wait](const Status& status, const std::vector<uint64_t>&) {
    const std::lock_guard<std::mutex> lock(wait->mutex);
    wait->outcome = status;
    wait->is_over.notify_one();
    if (status.ok() || !wait->has_gone_on) return;
    const Locked s;
    if (!s->is_running || s->late_failure) return;
    s->late_failure = status;
    if (s->failure.empty()) s->failure = status.message().substr(std::string("jaxmp.DistributedError: ").size());
  });
  const Clock::time_point since = Clock::now();
  std::unique_lock<std::mutex> lock(wait->mutex);
  const auto is_known = [&wait] { return wait->outcome.has_value(); };
  while (!wait->is_over.wait_for(lock, kMoment, is_known) && Locked()->IsHeld(*waiting, Clock::now() - since)) {
  }
  wait->has_gone_on = !is_known();
  return wait->outcome.value_or(Status());
}

// If the programs have different texts, the peer's message may still be on its way.
bool IsOneRun(int64_t own, int process, uint64_t theirs) {
  const auto mine = static_cast<barrier::Run>(own), others = static_cast<barrier::Run>(theirs);
  for (const Clock::time_point since = Clock::now(); !Locked()->arrivals.AreOneRun(mine, process, others);) {
    if (Clock::now() - since > kMoment) return false;
    std::this_thread::yield();
  }
  return true;
}

std::string BarrierFailure() { return Locked()->failure; }

std::string LateFailure() {
  const Locked s;
  return s->late_failure ? s->failure : "";
}

std::string LastCall() { return Locked()->last_call; }

// Asks every peer for a sign of life, so that the next answer is up to date.
std::vector<PeerState> PeerStates() {
  const Locked s;
  std::vector<PeerState> result;
  const Clock::time_point now = Clock::now();
  for (auto& [process, peer] : s->peers) {
    const double gone_for = peer.gone.empty() ? 0 : barrier::Seconds(now - peer.left);
    result.push_back({process, peer.gone, gone_for, peer.is_clean, barrier::Seconds(now - peer.heard)});
    peer.Ping(now);
  }
  return result;
}

}  // namespace jaxmp
