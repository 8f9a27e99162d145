#include "csrc/cuda/rank_context.h"

#include <atomic>
#include <limits>

#include "csrc/cublasmp/status.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"

namespace jaxmp::cuda {
namespace {

// What a rank that cannot go on brings to an agreement: more than any number of bytes.
constexpr int64_t kFailed = std::numeric_limits<int64_t>::max();

std::atomic<bool> may_ranks_share = false;

// For what stays for the life of the process.
template <typename T>
std::shared_ptr<T> Unowned(T* object) {
  return std::shared_ptr<T>(std::shared_ptr<T>(), object);
}

}  // namespace

void SetSharing(bool may_share) { may_ranks_share = may_share; }

RankContext::RankContext(std::string key, int64_t group, int rank, int nranks)
    : key_(std::move(key)), group_(group), rank_(rank), nranks_(nranks) {}

std::string RankContext::Describe() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(nranks_) + " in group " + std::to_string(group_) +
         " (device " + std::to_string(ordinal_) + ")";
}

Status RankContext::Enter(int ordinal, abi::CUcontext context, abi::CUstream stream,
                          std::shared_ptr<const std::string> call) {
  if (!watch_) JAXMP_RETURN_IF_ERROR(Open(ordinal, context));
  if (ordinal != ordinal_) {
    return FailedPrecondition("jaxmp: ", Describe(),
                              " has its communicator on that device, but this call runs on device ", ordinal,
                              ", and the program does not say which devices its mesh has, as an exported one; compile "
                              "it in this process instead");
  }
  if (!comm_) JAXMP_RETURN_IF_ERROR(Connect());
  stream_ = stream;
  (void)TakeLastError();  // of a call that recovered from it
  JAXMP_RETURN_IF_ERROR(watch_->Enter(std::move(call)));
  JAXMP_RETURN_IF_ERROR(watch_->Follow(stream));
  return Meet();
}

// Ranks that share a device leave wrong results where one is ahead of another (docs/gpu.md). NCCL's variable, which
// lets them share, may be set for some of them only.
Status RankContext::Meet() {
  if (nranks_ == 1 || may_share_ == 0) return {};
  JAXMP_ASSIGN_OR_RETURN(may_share_, AllReduceMax(may_ranks_share ? 1 : 0, stream_));
  return {};
}

void RankContext::Leave() {
  if (watch_) watch_->Leave();
}

Status RankContext::Open(int ordinal, abi::CUcontext context) {
  ordinal_ = ordinal;
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.MemAlloc_v2(&scratch_, sizeof(int64_t)), "cuMemAlloc"));
  JAXMP_ASSIGN_OR_RETURN(watch_, Watch::Make(context, Describe(), nranks_ > 1));
  return {};
}

// A communicator that blocks: cuBLASMp never asks NCCL whether a call is still in progress (its library has no
// reference to ncclCommGetAsyncError). ncclCommInitRank waits for every rank, and takes no deadline: the watchdog has
// one.
Status RankContext::Connect() {
  const std::string key = key_ + "/" + std::to_string(attempts_++);
  JAXMP_ASSIGN_OR_RETURN(const abi::ncclUniqueId id, AgreeOnId(key, rank_, nranks_));
  abi::ncclComm_t comm = nullptr;
  JAXMP_RETURN_IF_ERROR(watch_->Enter(std::make_shared<const std::string>("ncclCommInitRank")));
  const abi::ncclResult_t result = Loaded()->nccl.CommInitRank(&comm, nranks_, id, rank_);
  watch_->Leave();
  JAXMP_RETURN_IF_ERROR(Check(result, "ncclCommInitRank"));
  comm_ = comm;
  watch_->Adopt(comm);
  return {};
}

StatusOr<std::shared_ptr<abi::cublasMpGrid>> RankContext::Grid(const MpApi& api, const GridShape& shape) {
  std::shared_ptr<abi::cublasMpGrid>& known = grids_[shape];
  if (known) return known;
  abi::cublasMpGrid_t grid = nullptr;
  JAXMP_RETURN_IF_ERROR(
      jaxmp::Check(api, api.GridCreate(shape.nprow, shape.npcol, shape.order, comm_, &grid), "GridCreate"));
  known = Unowned(grid);
  return known;
}

StatusOr<std::shared_ptr<abi::cublasMpHandle>> RankContext::Handle(const MpApi& api, abi::cudaStream_t stream) {
  if (handle_) return handle_;
  abi::cublasMpHandle_t handle = nullptr;
  JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.Create(&handle, stream), "Create"));
  handle_ = Unowned(handle);
  handle_stream_ = stream;
  return handle_;
}

Status RankContext::SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) {
  if (stream == handle_stream_) return {};
  handle_stream_ = nullptr;
  JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.SetStream(handle, stream), "SetStream"));
  handle_stream_ = stream;
  return {};
}

StatusOr<int64_t> RankContext::AllReduceMax(int64_t value, abi::CUstream stream) {
  const Libraries& libraries = *Loaded();
  void* const at = reinterpret_cast<void*>(scratch_);
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.driver.MemcpyHtoDAsync_v2(scratch_, &value, sizeof(value), stream), "cuMemcpyHtoDAsync"));
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.nccl.AllReduce(at, at, 1, abi::ncclInt64, abi::ncclMax, comm_, stream), "ncclAllReduce"));
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.driver.MemcpyDtoHAsync_v2(&value, scratch_, sizeof(value), stream), "cuMemcpyDtoHAsync"));
  JAXMP_RETURN_IF_ERROR(Check(libraries.driver.StreamSynchronize(stream), "cuStreamSynchronize"));
  return value;
}

// One small all-reduce for each problem. It is also NCCL's first kernel on a new communicator, which all ranks then
// launch together, ahead of cuBLAS's.
StatusOr<size_t> RankContext::Agree(const Problem& problem, StatusOr<size_t> bytes, abi::cudaStream_t stream) {
  if (nranks_ == 1) return bytes;
  if (const auto found = agreed_.find(problem); found != agreed_.end()) {
    if (!bytes.ok()) return bytes;
    if (*bytes <= found->second) return found->second;
    return Internal("jaxmp: the library asks for a workspace of ", *bytes, " bytes, after ", found->second,
                    " for the same call before");
  }
  JAXMP_ASSIGN_OR_RETURN(const int64_t most, AllReduceMax(bytes.ok() ? static_cast<int64_t>(*bytes) : kFailed, stream));
  if (!bytes.ok()) return bytes;
  if (most == kFailed) {
    return FailedPrecondition("jaxmp: another rank of the group could not prepare this call; its own error says why");
  }
  agreed_[problem] = static_cast<size_t>(most);
  return static_cast<size_t>(most);
}

StatusOr<bool> RankContext::IsOnAll(bool is_here) {
  if (nranks_ == 1) return is_here;
  JAXMP_ASSIGN_OR_RETURN(const int64_t most, AllReduceMax(is_here ? 0 : kFailed, stream_));
  return most == 0;
}

// Always registered: without it cuBLASMp does not overlap.
StatusOr<std::shared_ptr<void>> RankContext::Workspace(const MpApi& api, const GridShape& shape, Pattern pattern,
                                                       size_t bytes, std::shared_ptr<void>) {
  Memory& memory = workspaces_[{shape, pattern}];
  if (memory.bytes >= bytes) return Unowned(memory.data);
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<abi::cublasMpGrid> grid, Grid(api, shape));
  JAXMP_RETURN_IF_ERROR(Grow(api, grid.get(), bytes, &memory));
  return Unowned(memory.data);
}

// Each rank allocates by itself, and nothing that waits for the others begins before all of them have their memory.
// Where one has none beside the old workspace, all of them give that back and try once more.
Status RankContext::Grow(const MpApi& api, abi::cublasMpGrid_t grid, size_t bytes, Memory* memory) {
  StatusOr<void*> made = Allocate(bytes);
  JAXMP_ASSIGN_OR_RETURN(bool is_on_all, IsOnAll(made.ok()));
  if (memory->data) {
    // Every call that used it is on this stream, or ahead of it by an event.
    JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.StreamSynchronize(stream_), "cuStreamSynchronize"));
    JAXMP_RETURN_IF_ERROR(Release(api, grid, std::exchange(*memory, {})));
    if (!is_on_all) {
      if (!made.ok()) made = Allocate(bytes);
      JAXMP_ASSIGN_OR_RETURN(is_on_all, IsOnAll(made.ok()));
    }
  }
  JAXMP_RETURN_IF_ERROR(made.status());
  if (is_on_all) return Register(api, grid, *made, bytes, memory);
  (void)Loaded()->nccl.MemFree(*made);
  return FailedPrecondition("jaxmp: another rank of the group has no memory for a workspace of ", bytes,
                            " bytes; its own error says why");
}

// Of NCCL's allocator, whose memory can be registered: cublasMpMalloc is this and cublasMpBufferRegister in one, and
// leaves the others waiting where one rank has no memory.
StatusOr<void*> RankContext::Allocate(size_t bytes) const {
  void* made = nullptr;
  const abi::ncclResult_t result = Loaded()->nccl.MemAlloc(&made, bytes);
  if (result == abi::ncclSuccess) return made;
  return ResourceExhausted("jaxmp: no memory for a workspace of ", bytes, " bytes: ncclMemAlloc: ", Why(result),
                           "; free memory on the device, or leave more of it to others than JAX "
                           "(XLA_PYTHON_CLIENT_MEM_FRACTION)");
}

// Memory that NCCL knows on all ranks, without which cuBLASMp does not overlap. A grid may have none (GPUs that do not
// reach each other's memory, for one): cuBLASMp then says so on every rank, ahead of anything collective, and its
// samples go on without.
Status RankContext::Register(const MpApi& api, abi::cublasMpGrid_t grid, void* made, size_t bytes,
                             Memory* memory) const {
  const abi::cublasMpStatus_t status = api.BufferRegister(grid, made, bytes);
  const bool is_registered = status != abi::CUBLASMP_STATUS_NOT_SUPPORTED;
  if (is_registered) {
    const Status registered = jaxmp::Check(api, status, "BufferRegister");
    if (!registered.ok()) (void)Loaded()->nccl.MemFree(made);
    JAXMP_RETURN_IF_ERROR(registered);
  }
  (void)TakeLastError();
  *memory = {made, bytes, is_registered};
  return {};
}

Status RankContext::Release(const MpApi& api, abi::cublasMpGrid_t grid, const Memory& memory) const {
  if (memory.is_registered) {
    JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.BufferDeregister(grid, memory.data), "BufferDeregister"));
  }
  return Check(Loaded()->nccl.MemFree(memory.data), "ncclMemFree");
}

}  // namespace jaxmp::cuda
