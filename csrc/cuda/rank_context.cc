#include "csrc/cuda/rank_context.h"

#include <atomic>
#include <limits>

#include "csrc/cublasmp/status.h"
#include "csrc/cuda/libraries.h"
#include "csrc/cuda/nccl_id_exchange.h"

namespace jaxmp::cuda {
namespace {

// A rank that cannot go on brings this to an agreement: more than any number of bytes.
constexpr int64_t kFailed = std::numeric_limits<int64_t>::max();

std::atomic<Wait> wait_here = Wait::kOnStream;

// For objects that stay for the life of the process.
template <typename T>
std::shared_ptr<T> Unowned(T* object) {
  return std::shared_ptr<T>(std::shared_ptr<T>(), object);
}

void Free(const std::vector<void*>& buffers) {
  for (void* buffer : buffers) (void)Loaded()->nccl.MemFree(buffer);
}

// FNV-1a: the same in every process, with any standard library.
int64_t DigestOf(const std::string& text) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const unsigned char byte : text) digest = (digest ^ byte) * 0x100000001b3;
  return static_cast<int64_t>(digest >> 1);
}

}  // namespace

void SetWait(Wait wait) { wait_here = wait; }

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
  (void)TakeLastError();  // errors of a call that recovered from them
  JAXMP_RETURN_IF_ERROR(watch_->Enter(std::move(call)));
  is_first_ = false;
  ++calls_;
  return watch_->Follow(stream);
}

// The comparison is also NCCL's first kernel on a new communicator: all ranks launch it together, before cuBLAS's.
Status RankContext::Compare(const Problem& problem, const std::string& call) {
  if (nranks_ == 1 || agreed_.count(problem) > 0) return {};
  is_first_ = true;
  watch_->Extend();
  const std::string text = "call " + std::to_string(calls_) + " of the group: " + call;
  const int64_t digest = DigestOf(text);
  const auto wait = static_cast<int64_t>(wait_here.load());
  JAXMP_ASSIGN_OR_RETURN(const Values most, AllReduceMax({digest, ~digest, wait, 0}));
  wait_ = static_cast<Wait>(most[2]);
  if (most[0] == digest && ~most[1] == digest) return {};
  const auto key = [this](int64_t of) { return key_ + "/call/" + std::to_string(of); };
  (void)CallExchange(key(digest), &text, Timeout());  // an error: another rank has published the same
  const int64_t other = most[0] == digest ? ~most[1] : most[0];
  // A peer that brings no digest waits before a product.
  const StatusOr<std::string> theirs =
      other < 0 ? std::string("a call that it has made before") : CallExchange(key(other), nullptr, Timeout());
  JAXMP_RETURN_IF_ERROR(theirs.status());
  return FailedPrecondition("jaxmp: the ranks of a group have come to different calls; this rank to ", text,
                            "; another one to ", *theirs);
}

Status RankContext::MeetBefore() {
  if (nranks_ == 1 || wait_ == Wait::kNone) return {};
  return wait_ == Wait::kOnHost ? AllReduceMax({}).status() : AllReduceScratch();
}

Status RankContext::MeetAfter() { return is_first_ ? AllReduceMax({}).status() : Status(); }

void RankContext::Leave() {
  if (watch_) watch_->Leave();
}

Status RankContext::Open(int ordinal, abi::CUcontext context) {
  ordinal_ = ordinal;
  JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.MemAlloc_v2(&scratch_, sizeof(Values)), "cuMemAlloc"));
  JAXMP_ASSIGN_OR_RETURN(watch_, Watch::Make(context, Describe(), nranks_ > 1));
  return {};
}

// Makes a communicator that blocks, because cuBLASMp never asks NCCL whether a call is still in progress (its library
// has no reference to ncclCommGetAsyncError). ncclCommInitRank waits for every rank and takes no deadline; the watchdog
// has one.
Status RankContext::Connect() {
  const std::string key = key_ + "/" + std::to_string(attempts_++);
  JAXMP_ASSIGN_OR_RETURN(const abi::ncclUniqueId id, AgreeOnId(key, rank_, nranks_));
  abi::ncclComm_t comm = nullptr;
  JAXMP_RETURN_IF_ERROR(watch_->Enter(std::make_shared<const std::string>("ncclCommInitRank")));
  watch_->Extend();
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

// The same operation wherever ranks wait for each other: if a rank is in a call that another has not come to, the other
// rank's comparison meets it and reports the difference.
Status RankContext::AllReduceScratch() {
  void* const at = reinterpret_cast<void*>(scratch_);
  return Check(Loaded()->nccl.AllReduce(at, at, Values().size(), abi::ncclInt64, abi::ncclMax, comm_, stream_),
               "ncclAllReduce");
}

// Waits on the host, and so for all ranks.
StatusOr<RankContext::Values> RankContext::AllReduceMax(Values values) {
  const Driver& driver = Loaded()->driver;
  JAXMP_RETURN_IF_ERROR(
      Check(driver.MemcpyHtoDAsync_v2(scratch_, values.data(), sizeof(values), stream_), "cuMemcpyHtoDAsync"));
  JAXMP_RETURN_IF_ERROR(AllReduceScratch());
  JAXMP_RETURN_IF_ERROR(
      Check(driver.MemcpyDtoHAsync_v2(values.data(), scratch_, sizeof(values), stream_), "cuMemcpyDtoHAsync"));
  JAXMP_RETURN_IF_ERROR(Check(driver.StreamSynchronize(stream_), "cuStreamSynchronize"));
  return values;
}

StatusOr<size_t> RankContext::Agree(const Problem& problem, StatusOr<size_t> bytes) {
  if (nranks_ == 1) return bytes;
  if (const auto found = agreed_.find(problem); found != agreed_.end()) {
    if (!bytes.ok()) return bytes;
    if (*bytes <= found->second) return found->second;
    return Internal("jaxmp: the library asks for a workspace of ", *bytes, " bytes, after ", found->second,
                    " for the same call before");
  }
  JAXMP_ASSIGN_OR_RETURN(const Values all, AllReduceMax({bytes.ok() ? static_cast<int64_t>(*bytes) : kFailed}));
  const int64_t most = all[0];
  if (!bytes.ok()) return bytes;
  if (most == kFailed) {
    return FailedPrecondition("jaxmp: another rank of the group could not prepare this call; its own error says why");
  }
  agreed_[problem] = static_cast<size_t>(most);
  return static_cast<size_t>(most);
}

StatusOr<bool> RankContext::IsOnAll(bool is_here) {
  if (nranks_ == 1) return is_here;
  JAXMP_ASSIGN_OR_RETURN(const Values most, AllReduceMax({is_here ? 0 : kFailed}));
  return most[0] == 0;
}

// Always registered, because cuBLASMp does not overlap otherwise.
StatusOr<std::shared_ptr<void>> RankContext::Workspace(const MpApi& api, const GridShape& shape, Pattern pattern,
                                                       size_t bytes, std::shared_ptr<void>) {
  Memory& memory = workspaces_[{shape, pattern}];
  if (memory.bytes < bytes) {
    JAXMP_ASSIGN_OR_RETURN(std::shared_ptr<abi::cublasMpGrid> grid, Grid(api, shape));
    JAXMP_RETURN_IF_ERROR(Grow(api, grid.get(), bytes, &memory));
  }
  if (memory.buffers.empty()) return std::shared_ptr<void>();
  return Unowned(memory.buffers[memory.turn++ % memory.buffers.size()]);
}

// Each rank allocates by itself, and registers nothing before all of them have their memory. If a rank has too little
// next to the old workspace, all ranks give the old one back and try once more.
Status RankContext::Grow(const MpApi& api, abi::cublasMpGrid_t grid, size_t bytes, Memory* memory) {
  StatusOr<std::vector<void*>> made = Allocate(bytes);
  JAXMP_ASSIGN_OR_RETURN(bool is_on_all, IsOnAll(made.ok()));
  if (memory->bytes > 0) {
    // Every call that used it is on this stream, or before it by an event.
    JAXMP_RETURN_IF_ERROR(Check(Loaded()->driver.StreamSynchronize(stream_), "cuStreamSynchronize"));
    JAXMP_RETURN_IF_ERROR(Release(api, grid, std::exchange(*memory, {})));
    if (!is_on_all) {
      if (!made.ok()) made = Allocate(bytes);
      JAXMP_ASSIGN_OR_RETURN(is_on_all, IsOnAll(made.ok()));
    }
  }
  JAXMP_RETURN_IF_ERROR(made.status());
  if (is_on_all) return Register(api, grid, {*made, bytes}, memory);
  Free(*made);
  return FailedPrecondition("jaxmp: another rank of the group has no memory for a workspace of ", bytes,
                            " bytes; its own error says why");
}

// Uses NCCL's allocator, because its memory can be registered. cublasMpMalloc is this and cublasMpBufferRegister in
// one, and leaves the others waiting if one rank has no memory.
StatusOr<std::vector<void*>> RankContext::Allocate(size_t bytes) const {
  std::vector<void*> made;
  while (made.size() < (nranks_ == 1 ? 1 : 2)) {
    void* buffer = nullptr;
    const abi::ncclResult_t result = Loaded()->nccl.MemAlloc(&buffer, bytes);
    if (result == abi::ncclSuccess) {
      made.push_back(buffer);
      continue;
    }
    Free(made);
    return ResourceExhausted("jaxmp: no memory for a workspace of ", bytes, " bytes: ncclMemAlloc: ", Why(result),
                             "; free memory on the device, or leave more of it to others than JAX "
                             "(XLA_PYTHON_CLIENT_MEM_FRACTION)");
  }
  return made;
}

// Registers memory with NCCL on all ranks, because cuBLASMp does not overlap otherwise. A grid may not support it (for
// example, GPUs that do not reach each other's memory): cuBLASMp then says so on every rank, before anything
// collective, and its samples go on without.
Status RankContext::Register(const MpApi& api, abi::cublasMpGrid_t grid, Memory made, Memory* memory) const {
  for (void* buffer : made.buffers) {
    const abi::cublasMpStatus_t status = api.BufferRegister(grid, buffer, made.bytes);
    made.is_registered = status != abi::CUBLASMP_STATUS_NOT_SUPPORTED;
    if (!made.is_registered) break;
    const Status registered = jaxmp::Check(api, status, "BufferRegister");
    if (!registered.ok()) Free(made.buffers);
    JAXMP_RETURN_IF_ERROR(registered);
  }
  (void)TakeLastError();
  *memory = std::move(made);
  return {};
}

Status RankContext::Release(const MpApi& api, abi::cublasMpGrid_t grid, const Memory& memory) const {
  for (void* buffer : memory.buffers) {
    if (!memory.is_registered) break;
    JAXMP_RETURN_IF_ERROR(jaxmp::Check(api, api.BufferDeregister(grid, buffer), "BufferDeregister"));
  }
  Free(memory.buffers);
  return {};
}

}  // namespace jaxmp::cuda
