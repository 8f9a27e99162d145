// One rank of one group on its device: the objects that its plans share.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/cuda/abi.h"
#include "csrc/cuda/watchdog.h"
#include "csrc/plan/communicator.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp::cuda {

// How the ranks of a group wait for each other before each call; set before the first one. The largest value on any
// rank holds for all of them.
enum class Wait : int64_t {
  kNone,      // for tests: two workspaces in turn are enough if the library keeps what NCCL promises
  kOnStream,  // by an all-reduce that the host does not wait for
  kOnHost,    // ranks that share a device (docs/gpu.md)
};
void SetWait(Wait wait);

// Communicator, handle, grids and workspaces are made when a call first needs them, on the thread of that call: making
// them is collective, and every rank comes to it at the same call of the same program. They stay for the life of the
// process, because destroying them is collective too, and nothing that ends (a plan, an executable) ends on all ranks
// at one time.
class RankContext final : public RankObjects {
 public:
  // `key` names the group: all of its ranks pass it, and no other group does.
  RankContext(std::string key, int64_t group, int rank, int nranks);

  // Held from Enter() to Leave(), so that calls run one at a time. No other rank's progress depends on it.
  std::mutex& call_mutex() { return call_mutex_; }

  // Begins a call on this device: makes sure of the communicator, and orders the stream after the last call.
  Status Enter(int ordinal, abi::CUcontext context, abi::CUstream stream, std::shared_ptr<const std::string> call);
  void Leave();
  // Returns an error if the ranks have come to different calls. Runs before anything else that is collective in a call
  // that this rank may not have made before.
  Status Compare(const Problem& problem, const std::string& call);
  // Let ranks wait for each other around the product on the stream, as Wait says; after a call's first run, on the
  // host: loading a kernel in CUDA may wait for other devices of the process, which must not be in the next call.
  Status MeetBefore();
  Status MeetAfter();
  Watch& watch() { return *watch_; }

  StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, const GridShape& shape) override;
  StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, abi::cudaStream_t stream) override;
  Status SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) override;
  StatusOr<size_t> Agree(const Problem& problem, StatusOr<size_t> bytes) override;
  StatusOr<std::shared_ptr<void>> Workspace(const MpApi& api, const GridShape& shape, Pattern pattern, size_t bytes,
                                            std::shared_ptr<void> last) override;

  std::string Describe() const;  // "rank 1 of 4 in group 0 (device 3)"

 private:
  // Two buffers (one without peers) that calls take in turn. A rank that starts call i + 1 has every peer's part of
  // call i, sent after the peer's call i - 1 had ended, so the buffer of call i - 1 is free on every rank.
  struct Memory {
    std::vector<void*> buffers;
    size_t bytes = 0, turn = 0;
    bool is_registered = false;
  };
  using Values = std::array<int64_t, 4>;

  Status Open(int ordinal, abi::CUcontext context);
  Status Connect();
  StatusOr<bool> IsOnAll(bool is_here);  // true if it is true on every rank
  Status Grow(const MpApi& api, abi::cublasMpGrid_t grid, size_t bytes, Memory* memory);
  StatusOr<std::vector<void*>> Allocate(size_t bytes) const;
  Status Register(const MpApi& api, abi::cublasMpGrid_t grid, Memory made, Memory* memory) const;
  Status Release(const MpApi& api, abi::cublasMpGrid_t grid, const Memory& memory) const;
  Status AllReduceScratch();
  StatusOr<Values> AllReduceMax(Values values);

  const std::string key_;
  const int64_t group_;
  const int rank_, nranks_;

  std::mutex call_mutex_;  // guards everything below
  int ordinal_ = -1;
  Wait wait_ = Wait::kNone;  // equal on all ranks from the first comparison on
  bool is_first_ = false;    // true if the current call is the first of its kind
  int64_t calls_ = 0;        // calls that have begun; equal on all ranks
  int attempts_ = 0;         // attempts to connect; equal on all ranks, because they fail together
  std::shared_ptr<Watch> watch_;
  abi::ncclComm_t comm_ = nullptr;
  abi::CUstream stream_ = nullptr;  // of the current call, then of the last one
  abi::CUdeviceptr scratch_ = 0;    // holds Values
  std::shared_ptr<abi::cublasMpHandle> handle_;
  abi::cudaStream_t handle_stream_ = nullptr;
  std::map<GridShape, std::shared_ptr<abi::cublasMpGrid>> grids_;
  // One for each pattern, as it ran on a GPU; it is not known whether calls of several patterns may share one.
  std::map<std::pair<GridShape, Pattern>, Memory> workspaces_;
  // The workspace that all ranks have agreed on for a problem. Kept as long as the other objects here, and longer than
  // plans: whether a call is collective must follow from the calls before it, not from what a process has kept.
  std::unordered_map<Problem, size_t, ProblemHash> agreed_;
};

}  // namespace jaxmp::cuda
