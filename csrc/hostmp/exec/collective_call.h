// One call in which all ranks of a group meet: what each of them brought, cut into pieces, and who tells each stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "csrc/base/float_state.h"
#include "csrc/base/status.h"
#include "csrc/hostmp/exec/workers.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

// What the ranks of a call compute once all have arrived: pieces that threads take one by one, in any order.
class SharedWork {
 public:
  virtual ~SharedWork() = default;
  virtual size_t pieces() const = 0;
  virtual double operations() const = 0;
  // On a thread that has this area, of Workers.
  virtual void Run(size_t piece, int area) = 0;
  // Behind the last piece, on one thread.
  virtual void Finish() {}
};

// What one rank brings.
class RankCall {
 public:
  virtual ~RankCall() = default;
  // The work of these ranks, which are in order and outlive it, or why they do not go together. The ranks that meet
  // have calls of one class.
  virtual StatusOr<std::unique_ptr<SharedWork>> Share(const std::vector<const RankCall*>& ranks) const = 0;
};

// One rank at the rendezvous: its call, or why it has none.
struct Arrival {
  Stream* stream = nullptr;
  std::unique_ptr<RankCall> call;
  Status error;
  FloatState state = FloatState::Current();  // of the rank's thread: its program resumes in it
};

// Where the thread is on which a rank arrived. It stays for a moment (kWaiting), helps, and completes its own stream;
// once it has gone on (kLeft), the stream is completed on another thread.
enum class WaiterState { kWaiting, kLeft, kDone };

struct CollectiveCall {
  explicit CollectiveCall(int nranks) : arrivals(static_cast<size_t>(nranks)), waiters(static_cast<size_t>(nranks)) {}

  // In which the work is done, whoever came last and whoever helps.
  const FloatState& state() const { return arrivals[0].state; }

  std::vector<Arrival> arrivals;  // by rank; a null stream has not arrived
  int count = 0;                  // of arrivals; both are guarded by the rendezvous until it is full
  std::vector<std::atomic<WaiterState>> waiters;

  // Written by the last rank to arrive, before `is_prepared`.
  std::unique_ptr<SharedWork> work;
  std::atomic<bool> is_prepared{false};
  std::atomic<size_t> next{0};
  // Pieces not yet done, and one for the last rank's thread: while it still asks its stream's
  // pool for help, nobody may complete that stream.
  std::atomic<size_t> left{0};
  Workers workers;
  Status status;  // written before the first waiter is kDone
};

// Records the arrival, and sees the call through for as long as that takes no waiting to speak of. The last rank's
// arrival runs the work, or hands every rank the error.
void Arrive(Arrival arrival, int rank, int nranks);

// Runs a call's work once all ranks have arrived. This thread, ranks' threads that are still here, and the pool's take
// part.
void Execute(const std::shared_ptr<CollectiveCall>& collective, int rank);

// Takes pieces of a prepared call until none is left; does nothing without an area (-1).
void Work(CollectiveCall& collective, int area);

// Ends the call: streams whose thread has gone are completed on other threads, the others by their own.
void Complete(CollectiveCall& collective, const Status& status);

}  // namespace jaxmp::hostmp
