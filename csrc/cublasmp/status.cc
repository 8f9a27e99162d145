#include "csrc/cublasmp/status.h"

#include <string>

namespace jaxmp {
namespace {

Code CodeOf(abi::cublasMpStatus_t status) {
  switch (status) {
    case abi::CUBLASMP_STATUS_INVALID_VALUE:
      return Code::kInvalidArgument;
    case abi::CUBLASMP_STATUS_NOT_SUPPORTED:
    case abi::CUBLASMP_STATUS_ARCHITECTURE_MISMATCH:
      return Code::kUnimplemented;
    case abi::CUBLASMP_STATUS_ALLOCATION_FAILED:
      return Code::kResourceExhausted;
    case abi::CUBLASMP_STATUS_NOT_INITIALIZED:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

}  // namespace

Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call) {
  if (status == abi::CUBLASMP_STATUS_SUCCESS) return {};
  const char* why = api.last_error();
  return {CodeOf(status),
          std::string("jaxmp: ") + api.name + " " + call + ": " + (*why ? why : api.GetStatusString(status))};
}

}  // namespace jaxmp
