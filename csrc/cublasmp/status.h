// A library's status code as a Status, and the other way round.
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

// Names the library and the call, with the library's own reason where it gave one. Ask right after the call, on its
// thread.
Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call);

}  // namespace jaxmp
