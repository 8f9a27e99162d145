#include "csrc/cuda/context_fault.h"

#include <chrono>
#include <thread>

#include "csrc/cuda/context_fault_code.h"
#include "csrc/cuda/libraries.h"

namespace jaxmp::cuda {
namespace {

// For cards that kMachineCode has nothing for: the driver's own compiler takes it for every later one.
constexpr char kPtx[] = R"(
.version 6.3
.target sm_70
.address_size 64
.visible .entry jaxmp_trap(.param .u32 is_sprung)
{
  .reg .u32 %is_sprung;
  .reg .pred %is_safe;
  ld.param.u32 %is_sprung, [is_sprung];
  setp.eq.u32 %is_safe, %is_sprung, 0;
  @%is_safe ret;
  trap;
}
)";

constexpr std::chrono::seconds kPatience(5);

// Machine code first: a driver may be without its compiler.
Status LoadKernel(abi::CUmodule* module) {
  const Driver& driver = Loaded()->driver;
  if (driver.ModuleLoadData(module, kMachineCode) == abi::CUDA_SUCCESS) return {};
  return Check(driver.ModuleLoadData(module, kPtx), "cuModuleLoadData");
}

}  // namespace

StatusOr<std::unique_ptr<const ContextFault>> ContextFault::Make() {
  const Driver& driver = Loaded()->driver;
  std::unique_ptr<ContextFault> fault(new ContextFault);
  abi::CUmodule module = nullptr;
  JAXMP_RETURN_IF_ERROR(LoadKernel(&module));
  JAXMP_RETURN_IF_ERROR(Check(driver.ModuleGetFunction(&fault->kernel_, module, "jaxmp_trap"), "cuModuleGetFunction"));
  JAXMP_RETURN_IF_ERROR(Check(driver.StreamCreate(&fault->stream_, abi::CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
  JAXMP_RETURN_IF_ERROR(Check(driver.EventCreate(&fault->done_, abi::CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  JAXMP_RETURN_IF_ERROR(fault->Launch(false));
  JAXMP_RETURN_IF_ERROR(Check(driver.StreamSynchronize(fault->stream_), "cuStreamSynchronize"));
  return std::unique_ptr<const ContextFault>(std::move(fault));
}

Status ContextFault::Launch(bool is_sprung) const {
  const Driver& driver = Loaded()->driver;
  unsigned int argument = is_sprung;
  void* arguments[] = {&argument};
  JAXMP_RETURN_IF_ERROR(
      Check(driver.LaunchKernel(kernel_, 1, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr), "cuLaunchKernel"));
  return Check(driver.EventRecord(done_, stream_), "cuEventRecord");
}

bool ContextFault::Raise() const {
  if (!Launch(true).ok()) return false;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    const abi::CUresult result = Loaded()->driver.EventQuery(done_);
    if (result != abi::CUDA_ERROR_NOT_READY) return result != abi::CUDA_SUCCESS;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace jaxmp::cuda
