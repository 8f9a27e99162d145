// A library's status code as a Status.
#ifndef JAXMP_CUBLASMP_STATUS_H_
#define JAXMP_CUBLASMP_STATUS_H_

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"

namespace jaxmp {

// Names the library and the call, with the library's own reason where it gave one. Ask right after the call, on its
// thread.
Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call);

}  // namespace jaxmp

#endif  // JAXMP_CUBLASMP_STATUS_H_
