#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/base/completion_pool.h"
#include "csrc/base/float_state.h"
#include "csrc/base/status.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

struct Rendezvous::Table {
  std::mutex mutex;
  // Calls in the order of their first arrivals. A rank joins the first call that it has not joined yet, so its
  // i-th arrival meets every rank's i-th, and the first call fills first. This is exact: the table belongs to one
  // instruction of one executable, all devices of the process run it, and within a run a device reaches it again only
  // in the next iteration of a loop. Entries are erased with their last call, so nothing grows with the number of runs.
  std::map<std::pair<int64_t, int64_t>, std::deque<std::shared_ptr<CollectiveCall>>> waiting;
};

Rendezvous::Rendezvous() : table_(std::make_unique<Table>()) {}

Rendezvous::~Rendezvous() {
  const Status status = FailedPrecondition("jaxmp: the executable was destroyed while ranks waited for their peers");
  for (const auto& entry : table_->waiting) {
    for (const std::shared_ptr<CollectiveCall>& collective : entry.second) Complete(*collective, status);
  }
}

namespace {

// The threads on which other ranks' programs resume, in the float state of each rank's own thread. Never destroyed,
// because the threads outlive main.
CompletionPool& completions() {
  static auto* const pool = new CompletionPool;
  return *pool;
}

void CompleteElsewhere(const Arrival& arrival, const Status& status) {
  completions().Post([stream = arrival.stream, state = arrival.state, status] {
    const ScopedFloatState scope(state);
    stream->done(stream->context, status);
  });
}

// Matches this rank's i-th arrival with every rank's i-th.
std::shared_ptr<CollectiveCall> Join(Rendezvous::Table& table, Arrival arrival, int rank, int nranks, bool* is_full) {
  const std::pair<int64_t, int64_t> key(arrival.stream->run_id, arrival.stream->group_id);
  std::lock_guard<std::mutex> lock(table.mutex);
  std::deque<std::shared_ptr<CollectiveCall>>& waiting = table.waiting[key];
  auto found = waiting.begin();
  while (found != waiting.end() && (*found)->arrivals[static_cast<size_t>(rank)].stream) ++found;
  if (found == waiting.end()) found = waiting.emplace(found, std::make_shared<CollectiveCall>(nranks));
  const std::shared_ptr<CollectiveCall> collective = *found;
  collective->arrivals[static_cast<size_t>(rank)] = std::move(arrival);
  *is_full = ++collective->count == nranks;
  if (*is_full) {
    waiting.erase(found);
    if (waiting.empty()) table.waiting.erase(key);
  }
  return collective;
}

Status FirstError(const std::vector<Arrival>& arrivals) {
  for (size_t rank = 0; rank < arrivals.size(); ++rank) {
    const Status& error = arrivals[rank].error;
    if (!error.ok() && arrivals.size() == 1) return error;
    if (!error.ok()) return Status(error.code(), StrCat("rank ", rank, " of ", arrivals.size(), ": ", error.message()));
  }
  return {};
}

// How long a thread waits for the other ranks and for the last piece: about twice the cost of waking another thread.
// The wait must end, because a program may need this thread to run the missing rank.
constexpr std::chrono::microseconds kSpinTimeout(100);
// How often a rank without peers checks whether helpers have finished their pieces.
constexpr std::chrono::microseconds kPoll(20);

template <typename Condition>
bool SpinUntil(const Condition& holds) {
  if (holds()) return true;
  const auto deadline = std::chrono::steady_clock::now() + kSpinTimeout;
  do {
    std::this_thread::yield();  // there may be more ranks than processors
    if (holds()) return true;
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// A rank's thread in a call: helps with the pieces if they come soon, and completes its own stream if it is still here
// at the end.
void Participate(CollectiveCall& collective, int rank, bool has_worked) {
  std::atomic<WaiterState>& waiter = collective.waiters[static_cast<size_t>(rank)];
  const auto is_done = [&waiter] { return waiter.load(std::memory_order_acquire) == WaiterState::kDone; };
  const auto is_prepared = [&] { return collective.is_prepared.load(std::memory_order_acquire); };
  if (!has_worked && SpinUntil([&] { return is_prepared() || is_done(); }) && !is_done()) {
    Work(collective, collective.workers.Join(current_processor()));
  }
  if (has_worked || is_prepared()) SpinUntil(is_done);
  // A rank without peers waits only for the pieces that helpers have begun.
  while (collective.arrivals.size() == 1 && !is_done()) std::this_thread::sleep_for(kPoll);
  const WaiterState before = waiter.exchange(WaiterState::kLeft, std::memory_order_acq_rel);
  if (before != WaiterState::kDone) return;  // Complete() completes the stream
  Stream* const stream = collective.arrivals[static_cast<size_t>(rank)].stream;
  stream->done(stream->context, collective.status);
}

}  // namespace

void Complete(CollectiveCall& collective, const Status& status) {
  collective.status = status;
  for (size_t rank = 0; rank < collective.arrivals.size(); ++rank) {
    const Arrival& arrival = collective.arrivals[rank];
    const WaiterState waiter = collective.waiters[rank].exchange(WaiterState::kDone, std::memory_order_acq_rel);
    if (arrival.stream && waiter == WaiterState::kLeft) CompleteElsewhere(arrival, status);
  }
}

void Arrive(Arrival arrival, int rank, int nranks) {
  bool is_full = nranks == 1;
  std::shared_ptr<CollectiveCall> collective;
  if (is_full) {
    collective = std::make_shared<CollectiveCall>(1);
    collective->arrivals[0] = std::move(arrival);
  } else {
    Rendezvous::Table& table = arrival.stream->rendezvous->table();
    collective = Join(table, std::move(arrival), rank, nranks, &is_full);
  }
  if (is_full) {
    const Status error = FirstError(collective->arrivals);
    error.ok() ? Execute(collective, rank) : Complete(*collective, error);
  }
  Participate(*collective, rank, is_full);
}

void Fail(Stream& stream, int rank, int nranks, Status why) {
  if (why.ok()) why = Internal("jaxmp: a rank gave up without saying why");
  Arrival arrival;
  arrival.stream = &stream;
  arrival.error = std::move(why);
  Arrive(std::move(arrival), rank, nranks);
}

}  // namespace jaxmp::hostmp
