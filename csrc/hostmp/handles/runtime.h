// Stands for CUDA and NCCL on the host: the communicator, the stream, and where ranks wait for each other.
//
// A host stream is asynchronous like a CUDA stream. Matmul validates, records the arrival of its rank and returns; the
// last rank to arrive runs the whole product in tiles, and every rank's stream is told when its part is done. No call
// blocks until another rank arrives, so ranks may arrive on any threads, even all on one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"

struct jaxmp::abi::ncclComm {
  int rank;
  int nranks;
  const void* group;  // identity only: ranks of one group share it
};

namespace jaxmp::hostmp {

// The ranks of one communicator. It holds only their number; comm(rank) stays valid as long as the group.
class Group {
 public:
  explicit Group(int nranks) {
    for (int rank = 0; rank < nranks; ++rank) comms_.push_back({rank, nranks, this});
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int nranks() const { return static_cast<int>(comms_.size()); }
  abi::ncclComm_t comm(int rank) const { return &comms_[static_cast<size_t>(rank)]; }

 private:
  mutable std::vector<abi::ncclComm> comms_;
};

// Threads that may help the arriving one. Schedule() is called only inside Matmul, on the thread of the last rank to
// arrive, and asks for `work` on this many threads. It may run there at any later time, or never: the product does not
// depend on it.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int num_threads() const = 0;
  virtual void Schedule(int64_t threads, const std::function<void()>& work) = 0;
};

// Matches the arrivals at ONE call site: the i-th arrival of a rank under a (run_id, group_id) meets the i-th arrival
// of every other rank. Calls in different places of a program, overlapping runs of one program, groups of a mesh and
// iterations of a loop therefore never mix. Arrivals that still wait when it is destroyed get an error.
class Rendezvous {
 public:
  Rendezvous();
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  struct Table;
  Table& table() { return *table_; }

 private:
  std::unique_ptr<Table> table_;
};

// One rank's stream for one call: the argument of cublasMpSetStream, cast by AsStream(). It must stay alive until
// done() was called. After a Matmul that returned SUCCESS, or after Fail(), done() is called exactly once:
// - on the rank's own thread, before Matmul or Fail() returns, if the call ends while that thread is still there: it
//   stays for a moment to help with the tiles, which is cheaper than waking another, and then goes on; a rank without
//   peers stays to the end;
// - else on a thread of hostmp's own, where it may block (the rest of a rank's program may resume there).
// After a Matmul that returned an error, done() is not called and the rank has not arrived: call Fail() for it.
struct Stream {
  Rendezvous* rendezvous = nullptr;  // of the call site; must live until this rank has arrived
  int64_t run_id = 0;
  int64_t group_id = 0;
  Pool* pool = nullptr;  // null: the arriving thread does all the work
  void (*done)(void* context, const Status& status) = nullptr;
  void* context = nullptr;
};

inline abi::cudaStream_t AsStream(Stream* stream) { return reinterpret_cast<abi::cudaStream_t>(stream); }

// Records the arrival of a rank that cannot go on: every rank of its call gets this error, and nothing is computed.
void Fail(Stream& stream, int rank, int nranks, Status why);

}  // namespace jaxmp::hostmp
