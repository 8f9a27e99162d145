// The custom call `jaxmp_process_collective`: a collective of a group whose processes share memory.
#ifndef JAXMP_FFI_PROCESS_COLLECTIVE_H_
#define JAXMP_FFI_PROCESS_COLLECTIVE_H_

#include <memory>
#include <utility>

#include "csrc/ffi/handler.h"
#include "csrc/shared_memory/collective.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct ProcessCollectiveSite : SiteType<ProcessCollectiveSite> {
  explicit ProcessCollectiveSite(std::shared_ptr<const SharedCollective> call) : call(std::move(call)) {}

  std::shared_ptr<const SharedCollective> call;
};

// Once per call site: decodes the attributes of a process barrier, and ranks, outer and sums (collective.h).
XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments an array, then the device's position in the mesh; the result of one array.
XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp

#endif  // JAXMP_FFI_PROCESS_COLLECTIVE_H_
