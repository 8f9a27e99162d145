#include "csrc/barrier/barrier.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "csrc/barrier/arrival_tracker.h"
#include "csrc/barrier/messages.h"
#include "csrc/barrier/peer.h"
#include "csrc/base/completion_pool.h"
#include "csrc/base/float_state.h"
#include "csrc/base/schedule_noise.h"

namespace jaxmp {
namespace {

using barrier::Arrival;
using barrier::ArrivalTracker;
using barrier::Clock;
using barrier::Kind;
using barrier::Message;
using barrier::Peer;

// How long two processes may wait for each other at different calls before that counts as a disagreement.
constexpr std::chrono::milliseconds kCrossed(500);

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// Gets the outcome, and of a collective the tokens.
using Done = std::function<void(const Status&, const std::vector<uint64_t>&)>;

// A device of this process that waits for the others.
struct Waiting {
  Arrival arrival;
  Clock::time_point since;
  Done done;
};

class BarrierService {
 public:
  void Start(const BarrierOptions& options);
  void Want(const std::vector<int>& processes);
  std::vector<int> Wanted();
  void Connect(int process, int fd);
  void Lose(int process, const std::string& gone);
  void Leave(const std::string& reason);
  void Stop();
  void Expect(const CallSignature& signature);
  void Arrive(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, size_t position,
              uint64_t token, Done done);
  std::string failure();
  std::string last_call();
  std::vector<PeerState> peers();

 private:
  struct Resumed {
    Done done;
    Status status;
    std::vector<uint64_t> tokens;
  };
  using Settled = std::vector<Resumed>;

  std::optional<Status> Outcome(const Arrival& arrival);
  std::optional<Status> OutcomeOfWaiting(const Waiting& waiting, Clock::time_point now);
  Status Fail(const Arrival& arrival, const std::string& why);
  std::string Missing(const Waiting& waiting, Clock::time_point now);
  void Send(const Arrival& arrival, const Message& message);
  Settled Settle();
  void Resume(Settled settled);

  void Serve();
  void ForgetInForks();
  void Wake();
  void DrainInterrupts();
  void Read(int process);
  void Handle(int process, const Message& message);
  void WantLocked(int process);
  Peer& peer(int process) { return peers_[process]; }

  std::mutex mutex_;
  bool is_running_ = false;
  BarrierOptions options_;
  std::map<int, Peer> peers_;  // those that are wanted, by process
  std::vector<int> wanted_;    // that nobody has been told of
  std::condition_variable has_wanted_;
  ArrivalTracker arrivals_{0};
  std::vector<Waiting> waiting_;  // in the order in which they came
  std::string failure_, last_call_;
  bool is_interrupted_ = false;
  int wake_[2] = {-1, -1};
  std::thread thread_;
  CompletionPool completions_;
};

// Never destroyed: its threads outlive main.
BarrierService& service() {
  static auto* const the_service = new BarrierService;
  return *the_service;
}

void BarrierService::Start(const BarrierOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_ = options;
  peers_.clear();
  wanted_.clear();
  arrivals_ = ArrivalTracker(options.process);
  failure_.clear();
  last_call_.clear();
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) wake_[0] = wake_[1] = -1;
  ForgetInForks();
  is_running_ = true;
  thread_ = std::thread([this] { Serve(); });
}

// A forked child has this process's sockets and none of its threads. It closes them, so that the peers see at once when
// this process ends, however long the child lives.
void BarrierService::ForgetInForks() {
  static const int registered = pthread_atfork([] { service().mutex_.lock(); }, [] { service().mutex_.unlock(); },
                                               [] {
                                                 service().is_running_ = false;
                                                 service().peers_.clear();
                                                 service().mutex_.unlock();
                                               });
  static_cast<void>(registered);
}

void BarrierService::Want(const std::vector<int>& processes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_running_) return;
  for (int process : processes) WantLocked(process);
}

void BarrierService::WantLocked(int process) {
  if (process == options_.process || process < 0 || process >= options_.nprocesses) return;
  Peer& wanted = peer(process);
  if (std::exchange(wanted.is_wanted, true)) return;
  if (wanted.is_connected || !wanted.gone.empty()) return;
  wanted_.push_back(process);
  has_wanted_.notify_one();
}

std::vector<int> BarrierService::Wanted() {
  std::unique_lock<std::mutex> lock(mutex_);
  has_wanted_.wait(lock, [this] { return !wanted_.empty() || !is_running_; });
  if (!is_running_) return {};
  return std::exchange(wanted_, {});
}

void BarrierService::Connect(int process, int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_of_use = is_running_ && process != options_.process && process >= 0 && process < options_.nprocesses &&
                         !peer(process).is_connected && peer(process).gone.empty();
  if (!is_of_use) {
    close(fd);
    return;
  }
  peer(process).Connect(fd);
  Wake();  // the thread has one more socket to read
}

void BarrierService::Lose(int process, const std::string& gone) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_running_ || peer(process).is_connected) return;
  peer(process).Leave(gone);
  Wake();
}

void BarrierService::Leave(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  Message goodbye;
  goodbye.kind = Kind::kGoodbye;
  goodbye.text = reason;
  for (auto& [process, peer] : peers_) peer.Send(goodbye);
}

void BarrierService::Stop() {
  Settled settled;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_running_) return;
    is_running_ = false;
    const Status stopped = FailedPrecondition("jaxmp.distributed was shut down");
    for (Waiting& waiting : waiting_) {
      const Status* failed = arrivals_.failure(waiting.arrival);
      settled.push_back({std::move(waiting.done), failed ? *failed : stopped, {}});
    }
    waiting_.clear();
  }
  Resume(std::move(settled));
  has_wanted_.notify_all();
  Wake();
  thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.clear();
  for (int& fd : wake_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

std::string BarrierService::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

std::string BarrierService::last_call() {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_call_;
}

// Asks every peer for a sign of life, so that the next answer is up to date.
std::vector<PeerState> BarrierService::peers() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<PeerState> result;
  const Clock::time_point now = Clock::now();
  for (auto& [process, peer] : peers_) {
    const double gone_for = peer.gone.empty() ? 0 : Seconds(now - peer.left);
    result.push_back({process, peer.gone, gone_for, peer.is_clean, Seconds(now - peer.heard)});
    peer.Ping(now);
  }
  return result;
}

void BarrierService::Expect(const CallSignature& signature) {
  std::lock_guard<std::mutex> lock(mutex_);
  arrivals_.Expect(signature);
}

// ---- a device comes

void BarrierService::Arrive(const std::shared_ptr<const CallSignature>& signature, const Origin& origin,
                            size_t position, uint64_t token, Done done) {
  const int last = signature->members[static_cast<size_t>(signature->groups[position])].processes.back();
  std::optional<Status> outcome;
  std::vector<uint64_t> tokens;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_running_) {
      outcome = FailedPrecondition(signature->call + ": jaxmp.distributed was shut down");
    } else if (last >= options_.nprocesses) {
      outcome = InvalidArgument(signature->call + ": a group names process " + std::to_string(last) + " of " +
                                std::to_string(options_.nprocesses));
    } else if (signature->has_tokens && arrivals_.IsAmbiguous(*signature, position, origin)) {
      outcome = FailedPrecondition(signature->call +
                                   ": two instructions of the compiled program have the number of this call, so that "
                                   "ranks cannot tell their operands apart; JAXMP_SHARED_MEMORY=off does without it");
    } else {
      const Arrival arrival = arrivals_.Arrive(signature, position, token);
      for (int process : arrival.members().processes) WantLocked(process);
      last_call_ = signature->call;
      if (const std::optional<Message> news = arrivals_.Announcement(arrival)) Send(arrival, *news);
      outcome = Outcome(arrival);
      if (!outcome) {
        waiting_.push_back({arrival, Clock::now(), done});
        if (waiting_.size() == 1) Wake();  // the thread has a deadline to watch from now on
      } else {
        if (outcome->ok()) tokens = arrivals_.TakeTokens(arrival);
        if (signature->has_tokens && !waiting_.empty()) Wake();  // other devices may have waited for this one alone
      }
    }
  }
  if (outcome) done(*outcome, tokens);
}

// To all other processes of the call.
void BarrierService::Send(const Arrival& arrival, const Message& message) {
  for (int process : arrival.members().processes) {
    if (process != options_.process) peer(process).Send(message);
  }
}

// ---- is everybody there?

std::optional<Status> BarrierService::Outcome(const Arrival& arrival) {
  if (const Status* failed = arrivals_.failure(arrival)) return *failed;
  if (auto why = arrivals_.Disagreement(arrival)) return Fail(arrival, *why);
  bool are_all_here = true;
  for (int process : arrival.members().processes) {
    if (!arrivals_.Awaits(arrival, process)) continue;
    are_all_here = false;
    if (process == options_.process) continue;
    if (!peer(process).gone.empty()) return Fail(arrival, "rank " + std::to_string(process) + " " + peer(process).gone);
  }
  if (!are_all_here) return std::nullopt;
  arrivals_.Settle(arrival);
  return Status();
}

// The same, later: an interrupt and the deadline end the waiting, and so do processes that wait for each other.
std::optional<Status> BarrierService::OutcomeOfWaiting(const Waiting& waiting, Clock::time_point now) {
  const Arrival& arrival = waiting.arrival;
  const auto waited = now - waiting.since;
  if (auto outcome = Outcome(arrival)) return outcome;
  if (is_interrupted_) return Fail(arrival, "interrupted by the user");
  const bool is_late = Seconds(waited) > options_.timeout;
  for (auto& [process, peer] : peers_) peer.Ping(now);
  for (int process : arrival.members().processes) {
    if (process == options_.process || !arrivals_.Awaits(arrival, process)) continue;
    if (!is_late && (!arrival.signature->is_sequential || waited <= kCrossed)) continue;
    if (auto why = arrivals_.Crossing(arrival, process)) return Fail(arrival, *why);
  }
  if (is_late) return Fail(arrival, Missing(waiting, now));
  return std::nullopt;
}

// Who has not come, and who else does not answer: whoever has not come may be waiting for that one.
std::string BarrierService::Missing(const Waiting& waiting, Clock::time_point now) {
  std::string missing;
  const std::vector<int>& members = waiting.arrival.members().processes;
  for (int process : members) {
    if (!arrivals_.Awaits(waiting.arrival, process)) continue;
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(process) + " ";
    missing += process == options_.process ? "has not come with all its devices" : peer(process).WhyMissing(now);
  }
  for (const auto& [process, peer] : peers_) {
    if (std::binary_search(members.begin(), members.end(), process) || !peer.IsSilent(now)) continue;
    missing += ", rank " + std::to_string(process) + " does not answer";
  }
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%.3g s", Seconds(now - waiting.since));
  return missing + "; rank " + std::to_string(options_.process) + " has waited for " + waited + " (JAXMP_TIMEOUT)";
}

// This process gives up, and tells the others.
Status BarrierService::Fail(const Arrival& arrival, const std::string& why) {
  const std::string text = arrival.signature->call + ": " + why;
  const Status status = FailedPrecondition("jaxmp.DistributedError: " + text);
  if (failure_.empty()) failure_ = text;
  arrivals_.Fail(arrival, status);
  Message message;
  message.kind = Kind::kFailure;
  message.key = arrival.members().key;
  message.count = arrival.count;
  message.text = text;
  Send(arrival, message);
  return status;
}

BarrierService::Settled BarrierService::Settle() {
  const Clock::time_point now = Clock::now();
  Settled settled;
  std::vector<Waiting> still;
  for (Waiting& waiting : waiting_) {
    if (const std::optional<Status> outcome = OutcomeOfWaiting(waiting, now)) {
      settled.push_back({std::move(waiting.done), *outcome, {}});
      if (outcome->ok()) settled.back().tokens = arrivals_.TakeTokens(waiting.arrival);
    } else {
      still.push_back(std::move(waiting));
    }
  }
  waiting_ = std::move(still);
  is_interrupted_ = false;
  return settled;
}

// Under no lock: programs come to their next call from here.
void BarrierService::Resume(Settled settled) {
  for (Resumed& each : settled) {
    completions_.Post([each = std::move(each)] { each.done(each.status, each.tokens); });
  }
}

// ---- the thread that reads

void BarrierService::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (is_running_) {
    std::vector<pollfd> polled = {{wake_[0], POLLIN, 0}, {options_.interrupts, POLLIN, 0}};
    std::vector<int> readable;
    for (const auto& [process, peer] : peers_) {
      if (!peer.socket.is_open()) continue;
      const int events = POLLIN | (peer.socket.has_unsent() ? POLLOUT : 0);
      polled.push_back({peer.socket.fd(), static_cast<int16_t>(events), 0});
      readable.push_back(process);
    }
    const int poll_timeout = waiting_.empty() ? -1 : 100;
    lock.unlock();
    poll(polled.data(), polled.size(), poll_timeout);
    lock.lock();
    if (!is_running_) return;
    char bytes[64];
    while (polled[0].revents && read(wake_[0], bytes, sizeof(bytes)) > 0) {
    }
    if (polled[1].revents) DrainInterrupts();
    for (size_t i = 0; i < readable.size(); ++i) {
      if (polled[i + 2].revents) Read(readable[i]);
    }
    Settled settled = Settle();
    lock.unlock();
    Resume(std::move(settled));
    lock.lock();
  }
}

void BarrierService::Wake() {
  const char byte = 0;
  if (wake_[1] >= 0 && write(wake_[1], &byte, 1) < 0) return;  // full: it is awake
}

// Python writes the number of each signal that it has a handler for.
void BarrierService::DrainInterrupts() {
  char bytes[64];
  for (ssize_t got; (got = read(options_.interrupts, bytes, sizeof(bytes))) > 0;) {
    is_interrupted_ |= std::find(bytes, bytes + got, char(2)) != bytes + got;  // SIGINT
  }
}

void BarrierService::Read(int process) {
  Peer& from = peer(process);
  from.socket.Flush();
  std::vector<Message> messages;
  const bool is_open = from.socket.Receive(&messages);
  from.heard = Clock::now();
  for (const Message& message : messages) Handle(process, message);
  if (!is_open) from.Leave("has ended without a word: it was killed, or crashed");
}

void BarrierService::Handle(int process, const Message& message) {
  Peer& from = peer(process);
  switch (message.kind) {
    case Kind::kArrival:
      from.last_call = arrivals_.Hear(process, message);
      return;
    case Kind::kFailure:
      arrivals_.HearFailure(message);
      if (failure_.empty()) failure_ = message.text;
      return;
    case Kind::kPing: {
      Message pong;
      pong.kind = Kind::kPong;
      pong.text = last_call_;
      from.Send(pong);
      return;
    }
    case Kind::kPong:
      from.last_call = message.text;
      return;
    case Kind::kGoodbye:
      if (from.is_clean) from.gone.clear();  // who left well may still see a failure, and then says so
      from.is_clean = message.text.empty();
      from.Leave(message.text.empty() ? "has ended" : "has ended: " + message.text);
      return;
  }
}

}  // namespace

void StartBarrier(const BarrierOptions& options) { service().Start(options); }
void WantProcesses(const std::vector<int>& processes) { service().Want(processes); }
std::vector<int> WantedProcesses() { return service().Wanted(); }
void ConnectPeer(int process, int fd) { service().Connect(process, fd); }
void LosePeer(int process, const std::string& gone) { service().Lose(process, gone); }
void LeaveBarrier(const std::string& reason) { service().Leave(reason); }
void StopBarrier() { service().Stop(); }
void ExpectCall(const CallSignature& signature) { service().Expect(signature); }

void Arrive(const std::shared_ptr<const CallSignature>& signature, int64_t position,
            std::function<void(const Status&)> done) {
  ArriveWithToken(signature, {}, position, 0,
                  [done = std::move(done)](const Status& status, const std::vector<uint64_t>&) { done(status); });
}

void ArriveWithToken(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position,
                     uint64_t token, std::function<void(const Status&, const std::vector<uint64_t>&)> done) {
  if (position < 0 || position >= static_cast<int64_t>(signature->groups.size())) {
    done(InvalidArgument(signature->call + ": the mesh has no position " + std::to_string(position)), {});
    return;
  }
  // Whoever waits resumes on a thread of ours, whoever comes last goes on at once: both compute alike.
  auto resume = [state = FloatState::Current(), done = std::move(done)](const Status& status,
                                                                        const std::vector<uint64_t>& tokens) {
    const ScopedFloatState scope(state);
    done(status, tokens);
  };
  AddScheduleNoise();
  service().Arrive(signature, origin, static_cast<size_t>(position), token, std::move(resume));
}

std::string BarrierFailure() { return service().failure(); }
std::string LastCall() { return service().last_call(); }
std::vector<PeerState> PeerStates() { return service().peers(); }

}  // namespace jaxmp
