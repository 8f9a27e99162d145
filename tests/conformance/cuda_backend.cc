#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "csrc/cuda/libraries.h"
#include "tests/conformance/backend.h"

namespace jaxmp::conformance {
namespace {

using cuda::Check;
using cuda::Driver;
using cuda::Nccl;

const Driver& driver() { return cuda::Loaded()->driver; }
const Nccl& nccl() { return cuda::Loaded()->nccl; }

abi::CUdeviceptr device_pointer(const void* memory) { return reinterpret_cast<abi::CUdeviceptr>(memory); }

class CudaRank final : public Rank {
 public:
  CudaRank(abi::ncclComm_t comm, abi::CUstream stream)
      : comm_(comm), stream_(stream), scratch_(allocate(sizeof(int64_t))) {}
  ~CudaRank() override {
    release(scratch_);
    (void)nccl().CommDestroy(comm_);
    (void)driver().StreamDestroy_v2(stream_);
  }

  abi::ncclComm_t comm() const override { return comm_; }
  abi::cudaStream_t stream(int64_t) override { return stream_; }
  void give_up(const std::string&) override {}  // a refusal is the same on all ranks

  Status meet() override {
    if (!std::getenv("NCCL_MULTI_RANK_GPU_ENABLE")) return {};
    if (!scratch_) return ResourceExhausted("no memory for the ranks to meet");
    JAXMP_RETURN_IF_ERROR(
        Check(nccl().AllReduce(scratch_, scratch_, 1, abi::ncclInt64, abi::ncclMax, comm_, stream_), "ncclAllReduce"));
    return synchronize();
  }
  Status synchronize() override { return Check(driver().StreamSynchronize(stream_), "cuStreamSynchronize"); }

  void* allocate(size_t bytes) override {
    abi::CUdeviceptr memory = 0;
    if (driver().MemAlloc_v2(&memory, bytes) != abi::CUDA_SUCCESS) return nullptr;
    return reinterpret_cast<void*>(memory);
  }
  void release(void* memory) override {
    if (memory) (void)driver().MemFree_v2(device_pointer(memory));
  }
  Status write(void* to, const void* from, size_t bytes) override {
    JAXMP_RETURN_IF_ERROR(
        Check(driver().MemcpyHtoDAsync_v2(device_pointer(to), from, bytes, stream_), "cuMemcpyHtoDAsync"));
    return synchronize();
  }
  Status read(void* to, const void* from, size_t bytes) override {
    JAXMP_RETURN_IF_ERROR(
        Check(driver().MemcpyDtoHAsync_v2(to, device_pointer(from), bytes, stream_), "cuMemcpyDtoHAsync"));
    return synchronize();
  }

 private:
  abi::ncclComm_t comm_;
  abi::CUstream stream_;
  void* scratch_;
};

// How the ranks get NCCL's id: in a process from each other, and between processes through a file that rank 0 makes.
class IdBox {
 public:
  explicit IdBox(std::string file) : file_(std::move(file)) {}

  StatusOr<abi::ncclUniqueId> get(int rank) {
    if (rank == 0) return make();
    if (!file_.empty()) return wait_for_file();
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return id_.has_value() || !failure_.ok(); });
    if (!failure_.ok()) return failure_;
    return *id_;
  }

 private:
  StatusOr<abi::ncclUniqueId> make() {
    abi::ncclUniqueId id;
    const Status made = Check(nccl().GetUniqueId(&id), "ncclGetUniqueId");
    if (made.ok() && !file_.empty()) {
      const std::string unfinished = file_ + ".part";
      std::ofstream(unfinished, std::ios::binary).write(id.internal, sizeof(id.internal));
      if (std::rename(unfinished.c_str(), file_.c_str()) != 0) return Internal("cannot write " + file_);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = made;
    if (made.ok()) id_ = id;
    wake_.notify_all();
    JAXMP_RETURN_IF_ERROR(made);
    return id;
  }

  StatusOr<abi::ncclUniqueId> wait_for_file() const {
    for (int i = 0; i < 600; ++i) {
      std::ifstream in(file_, std::ios::binary);
      abi::ncclUniqueId id;
      if (in.read(id.internal, sizeof(id.internal))) return id;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return FailedPrecondition("rank 0 has not written " + file_ + " within a minute");
  }

  std::string file_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<abi::ncclUniqueId> id_;
  Status failure_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const MpApi& api, int nranks, const std::string& id_file) : api_(api), nranks_(nranks), ids_(id_file) {}

  const MpApi& api() const override { return api_; }
  size_t workspace_bytes() const override { return size_t{512} << 20; }

  std::string take_words() override {
    std::set<std::string> said;  // by every rank of the process
    for (const std::string& line : cuda::TakeLog()) {
      const size_t at = line.find("Using ");
      if (at != std::string::npos) said.insert(line.substr(at + 6));
    }
    std::string words;
    for (const std::string& each : said) words += (words.empty() ? "" : "; ") + each;
    return words;
  }

  StatusOr<std::unique_ptr<Rank>> make_rank(int rank) override {
    int count = 0;
    JAXMP_RETURN_IF_ERROR(Check(driver().Init(0), "cuInit"));
    JAXMP_RETURN_IF_ERROR(Check(driver().DeviceGetCount(&count), "cuDeviceGetCount"));
    if (count == 0) return FailedPrecondition("the driver sees no GPU");
    abi::CUdevice device = 0;
    JAXMP_RETURN_IF_ERROR(Check(driver().DeviceGet(&device, rank % count), "cuDeviceGet"));  // ranks may share one
    abi::CUcontext context = nullptr;
    JAXMP_RETURN_IF_ERROR(Check(driver().DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
    JAXMP_RETURN_IF_ERROR(Check(driver().CtxSetCurrent(context), "cuCtxSetCurrent"));
    abi::CUstream stream = nullptr;
    JAXMP_RETURN_IF_ERROR(Check(driver().StreamCreate(&stream, abi::CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    JAXMP_ASSIGN_OR_RETURN(const abi::ncclUniqueId id, ids_.get(rank));
    abi::ncclComm_t comm = nullptr;
    JAXMP_RETURN_IF_ERROR(Check(nccl().CommInitRank(&comm, nranks_, id, rank), "ncclCommInitRank"));
    return std::unique_ptr<Rank>(std::make_unique<CudaRank>(comm, stream));
  }

 private:
  const MpApi& api_;
  int nranks_;
  IdBox ids_;
};

}  // namespace

StatusOr<std::unique_ptr<Backend>> make_cuda_backend(int nranks, const CudaOptions& options) {
  JAXMP_RETURN_IF_ERROR(cuda::Load(options.cublasmp, options.nccl, options.driver));
  JAXMP_ASSIGN_OR_RETURN(const MpApi* api, cuda::cuda_api());
  cuda::SetLogging(true);
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(*api, nranks, options.id_file));
}

}  // namespace jaxmp::conformance
