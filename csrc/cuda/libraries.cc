#include "csrc/cuda/libraries.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxmp::cuda {
namespace {

constexpr const char* kRemedy =
    "; pip install --upgrade 'jaxmp[cuda13]' (or [cuda12]) brings the right one, implementation=\"xla\" does without";

// Never closed, because handles, communicators and the driver's own threads go on using the libraries.
StatusOr<void*> Open(const char* what, const std::string& path, const char* remedy) {
  if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  const char* why = dlerror();
  return FailedPrecondition("jaxmp: ", what, " cannot be opened as ", path, " (", (why ? why : "no reason given"), ")",
                            remedy);
}

// The file that the loader took a function from.
std::string FileOf(void* symbol, const std::string& otherwise) {
  Dl_info info;
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : otherwise;
}

template <typename Function>
Status Find(void* handle, const std::string& name, const char* what, const std::string& path, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name.c_str()));
  if (*function) return {};
  return FailedPrecondition("jaxmp: ", path, " has no ", name, ", which ", what, " has", kRemedy);
}

std::string Dotted(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

Status OpenDriver(const std::string& path, Libraries* libraries) {
  const char* remedy = "; install NVIDIA's driver, or pass implementation=\"xla\"";
  JAXMP_ASSIGN_OR_RETURN(void* handle, Open("the CUDA driver", path, remedy));
#define JAXMP_FIND_FUNCTION(function) \
  JAXMP_RETURN_IF_ERROR(              \
      Find(handle, "cu" #function, "the CUDA driver of CUDA 12 or newer", path, &libraries->driver.function));
  JAXMP_DRIVER_FUNCTIONS(JAXMP_FIND_FUNCTION)
#undef JAXMP_FIND_FUNCTION
  int version = 0;
  if (const abi::CUresult result = libraries->driver.DriverGetVersion(&version); result != abi::CUDA_SUCCESS) {
    return FailedPrecondition("jaxmp: ", path, " does not tell its version (CUDA error ", result, ")", remedy);
  }
  libraries->info["driver"] = FileOf(reinterpret_cast<void*>(libraries->driver.Init), path);
  libraries->info["driver_version"] = Dotted(version / 1000, version % 1000 / 10);
  return {};
}

// Several ranks on one GPU came with 2.30; from 2.28 to 2.30.6 NCCL's symmetric kernels lacked a synchronisation.
Status OpenNccl(const std::string& path, Libraries* libraries) {
  JAXMP_ASSIGN_OR_RETURN(void* handle, Open("NCCL", path, kRemedy));
#define JAXMP_FIND_FUNCTION(function) \
  JAXMP_RETURN_IF_ERROR(Find(handle, "nccl" #function, "NCCL 2.30", path, &libraries->nccl.function));
  JAXMP_NCCL_FUNCTIONS(JAXMP_FIND_FUNCTION)
#undef JAXMP_FIND_FUNCTION
  int version = 0;
  const abi::ncclResult_t result = libraries->nccl.GetVersion(&version);
  const std::string text = Dotted(version / 10000, version / 100 % 100) + "." + std::to_string(version % 100);
  if (result != abi::ncclSuccess || version < 23007) {
    return FailedPrecondition("jaxmp: ", path, " is NCCL ", text, ", but cuBLASMp 0.10 needs 2.30.7 or newer", kRemedy);
  }
  libraries->info["nccl"] = FileOf(reinterpret_cast<void*>(libraries->nccl.GetVersion), path);
  libraries->info["nccl_version"] = text;
  return {};
}

// Checks that cuBLASMp uses our NCCL; another one would be handed communicators that it did not make.
Status CheckOneNccl(void* cublasmp, const std::string& path, const Libraries& libraries) {
  void* const theirs = dlsym(cublasmp, "ncclGetVersion");
  if (!theirs || theirs == reinterpret_cast<void*>(libraries.nccl.GetVersion)) return {};
  return FailedPrecondition("jaxmp: two NCCLs are in this process: ", libraries.info.at("nccl"), " was opened, but ",
                            path, " uses ", FileOf(theirs, "another"),
                            "; leave one of them on the loader's path (LD_LIBRARY_PATH, LD_PRELOAD)");
}

Status OpenCublasMp(const std::string& path, Libraries* libraries) {
  JAXMP_ASSIGN_OR_RETURN(void* handle, Open("cuBLASMp", path, kRemedy));
  // The version first, because a library of another version lacks functions, and its version says why.
  MpApi& api = libraries->cublasmp;
  JAXMP_RETURN_IF_ERROR(Find(handle, "cublasMpGetVersion", "cuBLASMp 0.10", path, &api.GetVersion));
  int version = 0;
  const abi::cublasMpStatus_t status = api.GetVersion(&version);
  const std::string text = Dotted(version / 10000, version / 100 % 100) + "." + std::to_string(version % 100);
  if (status != abi::CUBLASMP_STATUS_SUCCESS || version / 100 != 10) {
    return FailedPrecondition("jaxmp: ", path, " is cuBLASMp ", text, ", but 0.10 is required", kRemedy);
  }
#define JAXMP_FIND_FUNCTION(function) \
  JAXMP_RETURN_IF_ERROR(Find(handle, "cublasMp" #function, "cuBLASMp 0.10", path, &api.function));
  JAXMP_CUBLASMP_FUNCTIONS(JAXMP_FIND_FUNCTION)
#undef JAXMP_FIND_FUNCTION
  Logger& logger = libraries->logger;
  JAXMP_RETURN_IF_ERROR(Find(handle, "cublasMpLoggerSetCallback", "cuBLASMp 0.10", path, &logger.SetCallback));
  JAXMP_RETURN_IF_ERROR(Find(handle, "cublasMpLoggerSetFile", "cuBLASMp 0.10", path, &logger.SetFile));
  JAXMP_RETURN_IF_ERROR(Find(handle, "cublasMpLoggerSetLevel", "cuBLASMp 0.10", path, &logger.SetLevel));
  api.name = kCublasMp;
  api.fix_reduction_order = nullptr;
  api.last_error = TakeLastError;
  libraries->info["cublasmp"] = FileOf(reinterpret_cast<void*>(api.GetVersion), path);
  libraries->info["cublasmp_version"] = text;
  return CheckOneNccl(handle, path, *libraries);
}

// Never destroyed, like the libraries.
struct State {
  std::atomic<const Libraries*> loaded{nullptr};
  std::mutex mutex;
  std::string failure;  // of the last attempt; guarded by mutex
};

State& state() {
  static auto* const only = new State;
  return *only;
}

StatusOr<std::unique_ptr<const Libraries>> OpenAll(const std::string& cublasmp, const std::string& nccl,
                                                   const std::string& driver) {
  auto libraries = std::make_unique<Libraries>();
  JAXMP_RETURN_IF_ERROR(OpenDriver(driver, libraries.get()));
  // Before cuBLASMp, which then binds to it by its soname. cuBLASMp's own message about an old NCCL is a missing
  // symbol.
  JAXMP_RETURN_IF_ERROR(OpenNccl(nccl, libraries.get()));
  JAXMP_RETURN_IF_ERROR(OpenCublasMp(cublasmp, libraries.get()));
  return std::unique_ptr<const Libraries>(std::move(libraries));
}

}  // namespace

Status Load(const std::string& cublasmp, const std::string& nccl, const std::string& driver) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (Loaded()) return {};
  StatusOr<std::unique_ptr<const Libraries>> libraries = OpenAll(cublasmp, nccl, driver);
  state().failure = libraries.status().message();
  JAXMP_RETURN_IF_ERROR(libraries.status());
  ApplyLogging(**libraries);
  state().loaded.store(libraries->release(), std::memory_order_release);
  return {};
}

const Libraries* Loaded() { return state().loaded.load(std::memory_order_acquire); }

StatusOr<const MpApi*> cuda_api() {
  if (const Libraries* libraries = Loaded()) return &libraries->cublasmp;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().failure.empty()) return FailedPrecondition(state().failure);
  return FailedPrecondition(
      "jaxmp: cuBLASMp is not loaded in this process; call jaxmp.register() ahead of the program");
}

std::string Why(abi::CUresult result) {
  if (result == abi::CUDA_SUCCESS) return "";
  const char* text = nullptr;
  Loaded()->driver.GetErrorString(result, &text);
  return std::string(text ? text : "unknown") + " (CUDA error " + std::to_string(result) + ")";
}

std::string Why(abi::ncclResult_t result) {
  if (result == abi::ncclSuccess) return "";
  return std::string(Loaded()->nccl.GetErrorString(result)) + " (NCCL error " + std::to_string(result) + ")";
}

Status Check(abi::CUresult result, const char* call) {
  if (result == abi::CUDA_SUCCESS) return {};
  const std::string message = std::string("jaxmp: ") + call + ": " + Why(result);
  return result == abi::CUDA_ERROR_OUT_OF_MEMORY ? ResourceExhausted(message) : Internal(message);
}

Status Check(abi::ncclResult_t result, const char* call) {
  if (result == abi::ncclSuccess) return {};
  const char* last = Loaded()->nccl.GetLastError(nullptr);
  return Internal("jaxmp: ", call, ": ", Why(result), (last && *last ? std::string("; ") + last : ""));
}

}  // namespace jaxmp::cuda
