// One call in which all ranks of a group meet: the ranks' calls, the pieces of their work, and the end of each stream.
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

// The work of a call after all ranks have arrived: pieces that threads take one by one, in any order.
class SharedWork {
 public:
  virtual ~SharedWork() = default;
  virtual size_t pieces() const = 0;
  virtual double operations() const = 0;
  // Runs one piece on a thread that has this workspace area (see Workers).
  virtual void Run(size_t piece, int area) = 0;
  // Called on one thread after the last piece.
  virtual void Finish() {}
};

// One rank's part of a call.
class RankCall {
 public:
  virtual ~RankCall() = default;
  // Combines the calls of all ranks, in order of rank, or returns why they do not match. The calls are of one class and
  // outlive the work.
  virtual StatusOr<std::unique_ptr<SharedWork>> Share(const std::vector<const RankCall*>& ranks) const = 0;
};

// One rank at the rendezvous: its call, or the error that it brings instead.
struct Arrival {
  Stream* stream = nullptr;
  std::unique_ptr<RankCall> call;
  Status error;
  FloatState state = FloatState::Current();  // of the rank's thread: the rank's program resumes in it
};

// The state of the thread on which a rank arrived. It waits for a moment (kWaiting), helps, and completes its own
// stream. If it leaves before the end (kLeft), another thread completes the stream. kDone: the call has ended.
enum class WaiterState { kWaiting, kLeft, kDone };

struct CollectiveCall {
  explicit CollectiveCall(int nranks) : arrivals(static_cast<size_t>(nranks)), waiters(static_cast<size_t>(nranks)) {}

  // The float state of the work: rank 0's, no matter which rank comes last and which threads help.
  const FloatState& state() const { return arrivals[0].state; }

  std::vector<Arrival> arrivals;  // by rank; a null stream has not arrived
  int count = 0;                  // of arrivals; the rendezvous guards both until all ranks have arrived
  std::vector<std::atomic<WaiterState>> waiters;

  // Written by the last rank to arrive, before `is_prepared`.
  std::unique_ptr<SharedWork> work;
  std::atomic<bool> is_prepared{false};
  std::atomic<size_t> next{0};
  // Pieces not yet done, plus one for the last rank's thread: until it has asked its stream's pool for help, no thread
  // may complete that stream.
  std::atomic<size_t> left{0};
  Workers workers;
  Status status;  // written before the first waiter is kDone
};

// Records a rank's arrival and takes part in the call as long as that needs no long wait. The last rank to arrive runs
// the work, or passes an error to every rank.
void Arrive(Arrival arrival, int rank, int nranks);

// Runs a call's work after all ranks have arrived: on this thread, on the ranks' threads that still wait, and on the
// pool's.
void Execute(const std::shared_ptr<CollectiveCall>& collective, int rank);

// Takes pieces of a prepared call until none is left; does nothing without an area (-1).
void Work(CollectiveCall& collective, int area);

// Ends the call. A rank's thread completes its own stream; if it has left, another thread does.
void Complete(CollectiveCall& collective, const Status& status);

}  // namespace jaxmp::hostmp
