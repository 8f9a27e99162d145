// The three libraries of the CUDA side, opened at run time: the driver, NCCL and cuBLASMp.
#ifndef JAXMP_CUDA_LIBRARIES_H_
#define JAXMP_CUDA_LIBRARIES_H_

#include <map>
#include <string>

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

// Opens and checks all three, given as paths or as names for the loader. The first success holds for the process;
// further calls change nothing. A failure is one sentence, changes nothing and may be tried again.
Status Load(const std::string& cublasmp, const std::string& nccl, const std::string& driver);

// What Load() opened; null before it succeeded. Lives as long as the process.
const Libraries* Loaded();

// The table over the loaded cuBLASMp.
StatusOr<const MpApi*> cuda_api();

// "" for success, else what the driver or NCCL says about it.
std::string Why(abi::CUresult result);
std::string Why(abi::ncclResult_t result);
Status Check(abi::CUresult result, const char* call);
Status Check(abi::ncclResult_t result, const char* call);

}  // namespace jaxmp::cuda

#endif  // JAXMP_CUDA_LIBRARIES_H_
