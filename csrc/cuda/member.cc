#include "csrc/cuda/member.h"

#include <limits>

#include "csrc/cuda/exchange.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/log.h"
#include "csrc/mp_status.h"

namespace jaxmp::cuda {
namespace {

// What a rank that cannot go on brings to an agreement: more than any number of bytes.
constexpr int64_t kFailed = std::numeric_limits<int64_t>::max();

// For what stays for the life of the process.
template <typename T>
std::shared_ptr<T> Unowned(T* object) {
  return std::shared_ptr<T>(std::shared_ptr<T>(), object);
}

}  // namespace

Member::Member(std::string key, int64_t group, int rank, int nranks)
    : key_(std::move(key)), group_(group), rank_(rank), nranks_(nranks) {}

std::string Member::Describe() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(nranks_) + " in group " + std::to_string(group_) +
         " (device " + std::to_string(ordinal_) + ")";
}

Status Member::Enter(int ordinal, abi::CUcontext context, abi::CUstream stream,
                     std::shared_ptr<const std::string> call) {
  if (!watch_) JAXMP_RETURN_IF_ERROR(Open(ordinal, context));
  if (ordinal != ordinal_) {
    return FailedPrecondition("jaxmp: " + Describe() +
                              " has its communicator on that device, but this call runs on "
                              "device " +
                              std::to_string(ordinal) +
                              ", and the program does not say which devices its "
                              "mesh has, as an exported one; compile it in this process instead");
  }
  if (!comm_) JAXMP_RETURN_IF_ERROR(Connect());
  stream_ = stream;
  (void)TakeLastError();  // of a call that recovered from it
  watch_->Enter(std::move(call));
  return watch_->Follow(stream);
}

void Member::Leave() {
  if (watch_) watch_->Leave();
}

Status Member::Open(int ordinal, abi::CUcontext context) {
  ordinal_ = ordinal;
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.MemAlloc_v2(&scratch_, sizeof(int64_t)), "cuMemAlloc"));
  JAXMP_ASSIGN_OR_RETURN(watch_, Watch::Make(context, Describe(), nranks_ > 1));
  return {};
}

Status Member::Connect() {
  const std::string key = key_ + "/" + std::to_string(attempts_++);
  JAXMP_ASSIGN_OR_RETURN(abi::ncclUniqueId id, AgreeOnId(key, rank_, nranks_));
  watch_->Enter(std::make_shared<const std::string>("ncclCommInitRank"));
  abi::ncclComm_t comm = nullptr;
  const abi::ncclResult_t result = Loaded()->nccl.CommInitRank(&comm, nranks_, id, rank_);
  watch_->Leave();
  JAXMP_RETURN_IF_ERROR(Check(result, "ncclCommInitRank"));
  comm_ = comm;
  return watch_->Adopt(comm);
}

StatusOr<std::shared_ptr<abi::cublasMpGrid>> Member::Grid(const MpApi& api, const GridShape& shape) {
  std::shared_ptr<abi::cublasMpGrid>& known = grids_[shape];
  if (known) return known;
  abi::cublasMpGrid_t grid = nullptr;
  JAXMP_RETURN_IF_ERROR(
      jaxmp::Check(api, api.GridCreate(shape.nprow, shape.npcol, shape.order, comm_, &grid), "GridCreate"));
  known = Unowned(grid);
  return known;
}

StatusOr<std::shared_ptr<abi::cublasMpHandle>> Member::Handle(const MpApi& api, abi::cudaStream_t stream) {
  if (handle_) return handle_;
  abi::cublasMpHandle_t handle = nullptr;
  JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.Create(&handle, stream), "Create"));
  handle_ = Unowned(handle);
  return handle_;
}

StatusOr<int64_t> Member::AllReduceMax(int64_t value, abi::CUstream stream) {
  const Libraries& libraries = *Loaded();
  void* const at = reinterpret_cast<void*>(scratch_);
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.driver.MemcpyHtoDAsync_v2(scratch_, &value, sizeof(value), stream), "cuMemcpyHtoDAsync"));
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.nccl.AllReduce(at, at, 1, abi::ncclInt64, abi::ncclMax, comm_, stream), "ncclAllReduce"));
  JAXMP_RETURN_IF_ERROR(
      Check(libraries.driver.MemcpyDtoHAsync_v2(&value, scratch_, sizeof(value), stream), "cuMemcpyDtoHAsync"));
  JAXMP_RETURN_IF_ERROR(Check(libraries.driver.StreamSynchronize(stream), "cuStreamSynchronize"));
  JAXMP_RETURN_IF_ERROR(CheckAlive());  // an aborted reduction says nothing
  return value;
}

// One small all-reduce for each plan, when it is made. It is also NCCL's first kernel on a new communicator, which all
// ranks then launch together, ahead of cuBLAS's.
StatusOr<size_t> Member::Agree(StatusOr<size_t> bytes, abi::cudaStream_t stream) {
  if (nranks_ == 1) return bytes;
  JAXMP_ASSIGN_OR_RETURN(const int64_t most, AllReduceMax(bytes.ok() ? static_cast<int64_t>(*bytes) : kFailed, stream));
  if (!bytes.ok()) return bytes;
  if (most != kFailed) return static_cast<size_t>(most);
  return FailedPrecondition("jaxmp: another rank of the group could not prepare this call; its own error says why");
}

StatusOr<std::shared_ptr<void>> Member::Workspace(const MpApi& api, const GridShape& shape, size_t bytes) {
  Memory& memory = workspaces_[shape];
  if (memory.bytes >= bytes) return Unowned(memory.data);
  JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<abi::cublasMpGrid> grid, Grid(api, shape));
  if (memory.data) {
    // Every call that used it is on this stream, or ahead of it by an event.
    JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.StreamSynchronize(stream_), "cuStreamSynchronize"));
    void* const old = std::exchange(memory, {}).data;
    JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.Free(grid.get(), old), "Free"));
  }
  void* made = nullptr;
  JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.Malloc(grid.get(), &made, bytes), "Malloc"));
  memory = {made, bytes};
  return Unowned(made);
}

}  // namespace jaxmp::cuda
