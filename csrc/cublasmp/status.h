// Converts a library's status code to a Status, and back.
#pragma once

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"

namespace jaxmp {

struct StatusWord {
  abi::cublasMpStatus_t number;
  Code code;
  const char* name;
};

const StatusWord& WordOf(abi::cublasMpStatus_t number);
abi::cublasMpStatus_t NumberOf(Code code);

// Returns an error that names the library and the call, with the library's own reason if it gave one. Run it right
// after the call, on its thread.
Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call);

}  // namespace jaxmp
