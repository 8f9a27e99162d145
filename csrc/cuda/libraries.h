// The three libraries of the CUDA side, opened at run time: the driver, NCCL and cuBLASMp.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/cuda/abi.h"

namespace jaxmp::cuda {

struct Driver {
#define JAXMP_DECLARE_FUNCTION(function) decltype(&abi::cu##function) function = nullptr;
  JAXMP_DRIVER_FUNCTIONS(JAXMP_DECLARE_FUNCTION)
#undef JAXMP_DECLARE_FUNCTION
};

struct Nccl {
#define JAXMP_DECLARE_FUNCTION(function) decltype(&abi::nccl##function) function = nullptr;
  JAXMP_NCCL_FUNCTIONS(JAXMP_DECLARE_FUNCTION)
#undef JAXMP_DECLARE_FUNCTION
};

struct Logger {
  decltype(&abi::cublasMpLoggerSetCallback) SetCallback = nullptr;
  decltype(&abi::cublasMpLoggerSetFile) SetFile = nullptr;
  decltype(&abi::cublasMpLoggerSetLevel) SetLevel = nullptr;
};

struct Libraries {
  Driver driver;
  Nccl nccl;
  MpApi cublasmp{};
  Logger logger;
  // Paths and versions, for people to read: cublasmp, cublasmp_version, nccl, nccl_version, driver, driver_version.
  std::map<std::string, std::string> info;
};

// Opens and checks all three, given as paths or as names for the loader. The first success holds for the process; later
// calls change nothing. A failure is one sentence, changes nothing and may be tried again.
Status Load(const std::string& cublasmp, const std::string& nccl, const std::string& driver);

// Returns the libraries that Load() opened; null before it succeeded. They live as long as the process.
const Libraries* Loaded();

// Makes a context current for a scope.
//
// The libraries use the current context. When XLA calls a handler, this may be its device's, another one or none,
// because one of XLA's clients runs a device's programs on any thread of a pool. The watchdog's thread has none.
class CurrentContext {
 public:
  explicit CurrentContext(abi::CUcontext context) {
    abi::CUcontext current = nullptr;
    const Driver& driver = Loaded()->driver;
    is_current_ = driver.CtxGetCurrent(&current) == abi::CUDA_SUCCESS && current == context;
    if (is_current_) return;
    is_pushed_ = is_current_ = driver.CtxPushCurrent_v2(context) == abi::CUDA_SUCCESS;
  }
  ~CurrentContext() {
    abi::CUcontext popped = nullptr;
    if (is_pushed_) (void)Loaded()->driver.CtxPopCurrent_v2(&popped);
  }
  // True if the context is current now.
  bool ok() const { return is_current_; }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool is_current_ = false, is_pushed_ = false;
};

// Returns the table of the loaded cuBLASMp.
StatusOr<const MpApi*> cuda_api();

// Returns "" for success, else the text of the driver or of NCCL.
std::string Why(abi::CUresult result);
std::string Why(abi::ncclResult_t result);
Status Check(abi::CUresult result, const char* call);
Status Check(abi::ncclResult_t result, const char* call);

// ---- cuBLASMp's messages: which algorithm it took, and why a call failed (logger.cc)

// On: the library reports everything to this process, with lines such as "[cublasMpMatmul] Using AllGather + Matmul".
// Off: only errors, which complete the messages of failed calls. Overrides CUBLASMP_LOG_LEVEL and CUBLASMP_LOG_FILE,
// because every line would also appear on stdout otherwise. May be called before the library is loaded.
void SetLogging(bool is_on);

// Applies the setting to a library that was just loaded.
void ApplyLogging(const Libraries& libraries);

// Takes the lines since the last call, oldest first; at most the newest 4096.
std::vector<std::string> TakeLog();

// Takes the errors that the library reported on this thread since the last call, in one line; "" if there are none. A
// failed call may report several, the cause first. Valid until the next call.
const char* TakeLastError();

}  // namespace jaxmp::cuda
