#include "csrc/cublasmp/status.h"

#include <iterator>

namespace jaxmp {
namespace {

// hostmp returns the first number of a code. The last word stands for all other numbers.
constexpr StatusWord kWords[] = {
    {abi::CUBLASMP_STATUS_SUCCESS, Code::kOk, "success"},
    {abi::CUBLASMP_STATUS_INVALID_VALUE, Code::kInvalidArgument, "invalid value"},
    {abi::CUBLASMP_STATUS_NOT_SUPPORTED, Code::kUnimplemented, "not supported"},
    {abi::CUBLASMP_STATUS_ARCHITECTURE_MISMATCH, Code::kUnimplemented, "architecture mismatch"},
    {abi::CUBLASMP_STATUS_ALLOCATION_FAILED, Code::kResourceExhausted, "allocation failed"},
    {abi::CUBLASMP_STATUS_NOT_INITIALIZED, Code::kFailedPrecondition, "not initialized"},
    {abi::CUBLASMP_STATUS_INTERNAL_ERROR, Code::kInternal, "internal error"},
    {abi::CUBLASMP_STATUS_EXECUTION_FAILED, Code::kInternal, "execution failed"},
    {static_cast<abi::cublasMpStatus_t>(-1), Code::kInternal, "unknown status"}};

}  // namespace

const StatusWord& WordOf(abi::cublasMpStatus_t number) {
  const StatusWord* word = kWords;
  while (word->number != number && word + 1 != std::end(kWords)) ++word;
  return *word;
}

abi::cublasMpStatus_t NumberOf(Code code) {
  const StatusWord* word = kWords;
  while (word->code != code) ++word;
  return word->number;
}

Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call) {
  if (status == abi::CUBLASMP_STATUS_SUCCESS) return {};
  const char* why = api.last_error();
  return {WordOf(status).code, StrCat("jaxmp: ", api.name, " ", call, ": ", *why ? why : api.GetStatusString(status))};
}

}  // namespace jaxmp
