// One rank of one group on its device: what its plans share.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/cuda/abi.h"
#include "csrc/cuda/watchdog.h"
#include "csrc/plan/communicator.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp::cuda {

// Whether ranks of other processes may be on this process's devices; said ahead of its first call.
void SetSharing(bool may_share);

// Communicator, handle, grids and workspaces are made when a call first needs them, on the thread that brings that
// call: making them is collective, and every rank comes to it at the same call of the same program. They stay for the
// life of the process: destroying them is collective too, and nothing that ends (a plan, an executable) ends on all
// ranks at one time.
class RankContext final : public RankObjects {
 public:
  // `key` names the group to all of its ranks, and no other group.
  RankContext(std::string key, int64_t group, int rank, int nranks);

  // One call at a time: held from Enter() to Leave(). No other rank's progress depends on it.
  std::mutex& call_mutex() { return call_mutex_; }

  // Begins a call on this device: the communicator is there and usable, the stream ordered behind the last call. Where
  // ranks may share a device, waits on the host until all of them have done every call before this one.
  Status Enter(int ordinal, abi::CUcontext context, abi::CUstream stream, std::shared_ptr<const std::string> call);
  void Leave();
  Watch& watch() { return *watch_; }

  StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, const GridShape& shape) override;
  StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, abi::cudaStream_t stream) override;
  Status SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) override;
  StatusOr<size_t> Agree(const Problem& problem, StatusOr<size_t> bytes, abi::cudaStream_t stream) override;
  StatusOr<std::shared_ptr<void>> Workspace(const MpApi& api, const GridShape& shape, Pattern pattern, size_t bytes,
                                            std::shared_ptr<void> last) override;

  std::string Describe() const;  // "rank 1 of 4 in group 0 (device 3)"

 private:
  struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
    bool is_registered = false;
  };

  Status Open(int ordinal, abi::CUcontext context);
  Status Connect();
  Status Meet();
  StatusOr<bool> IsOnAll(bool is_here);  // whether it is so on every rank
  Status Grow(const MpApi& api, abi::cublasMpGrid_t grid, size_t bytes, Memory* memory);
  StatusOr<void*> Allocate(size_t bytes) const;
  Status Register(const MpApi& api, abi::cublasMpGrid_t grid, void* made, size_t bytes, Memory* memory) const;
  Status Release(const MpApi& api, abi::cublasMpGrid_t grid, const Memory& memory) const;
  StatusOr<int64_t> AllReduceMax(int64_t value, abi::CUstream stream);

  const std::string key_;
  const int64_t group_;
  const int rank_, nranks_;

  std::mutex call_mutex_;  // guards everything below
  int ordinal_ = -1;
  int64_t may_share_ = -1;  // whether ranks may share a device, equal on all ranks; -1: not agreed on
  int attempts_ = 0;        // to connect; equal on all ranks, for they fail together
  std::shared_ptr<Watch> watch_;
  abi::ncclComm_t comm_ = nullptr;
  abi::CUstream stream_ = nullptr;  // of the call at hand, then of the last one
  abi::CUdeviceptr scratch_ = 0;    // 8 bytes
  std::shared_ptr<abi::cublasMpHandle> handle_;
  abi::cudaStream_t handle_stream_ = nullptr;
  std::map<GridShape, std::shared_ptr<abi::cublasMpGrid>> grids_;
  // One for each pattern, as it ran on a GPU; whether calls of several may share one is not known.
  std::map<std::pair<GridShape, Pattern>, Memory> workspaces_;
  // What all ranks have agreed to take for a problem. As long as the other objects here, and longer than plans: whether
  // a call is collective must follow from the calls before it, not from what a process has kept.
  std::unordered_map<Problem, size_t, ProblemHash> agreed_;
};

}  // namespace jaxmp::cuda
