// A library's status code as a Status.
#ifndef JAXMP_MP_STATUS_H_
#define JAXMP_MP_STATUS_H_

#include "csrc/mp_api.h"
#include "csrc/status.h"

namespace jaxmp {

// Names the library and the call, with the library's own reason where it gave one. Ask right after the call, on its
// thread.
Status Check(const MpApi& api, abi::cublasMpStatus_t status, const char* call);

}  // namespace jaxmp

#endif  // JAXMP_MP_STATUS_H_
