// The communicator of a mesh's groups on CUDA devices.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cuda/rank_context.h"
#include "csrc/plan/communicator.h"

namespace jaxmp::cuda {

// A local rank is a rank of a group; if groups have one rank, it is a device of this process.
class CudaCommunicator final : public Communicator {
 public:
  // Use GetCudaCommunicator().
  CudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices);

  int num_local_ranks() const override { return static_cast<int>(rank_contexts_.size()); }
  bool is_made_at_once() const override { return false; }
  RankObjects& rank_objects(int local_rank) const override { return rank_context(local_rank); }

  // Returns the local rank of the device with this ordinal at this position.
  StatusOr<int> LocalRankOf(int64_t position, int ordinal) const;
  RankContext& rank_context(int local_rank) const { return *rank_contexts_[static_cast<size_t>(local_rank)]; }

 private:
  std::vector<std::unique_ptr<RankContext>> rank_contexts_;  // by local rank
};

// A call on a local rank, from its first collective step to the last step that it puts on the stream.
class CallScope {
 public:
  explicit CallScope(RankContext& rank_context) : lock_(rank_context.call_mutex()), rank_context_(rank_context) {}
  ~CallScope() { rank_context_.Leave(); }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const std::unique_lock<std::mutex> lock_;
  RankContext& rank_context_;
};

// The global ids of this process's devices, by ordinal.
void SetDeviceIds(const std::map<int, int64_t>& ids);

// Returns the position of the device with this ordinal among `devices`, global ids by position. An error if it is not
// among them, or if its id is not known.
StatusOr<int64_t> PositionOf(const std::vector<int64_t>& devices, int ordinal);

// Returns the communicator of these axes on these devices (global ids by position; empty if they are not known): one
// for the life of the process. Needs the libraries.
std::shared_ptr<const CudaCommunicator> GetCudaCommunicator(const Axes& axes, const std::vector<int64_t>& devices);

}  // namespace jaxmp::cuda
