// The custom calls between processes: `jaxmp_process_barrier` gives its operands once every process of the group has
// come; `jaxmp_process_collective` is a collective of a group whose processes share memory.
#pragma once

#include <memory>
#include <utility>

#include "csrc/barrier/call_signature.h"
#include "csrc/ffi/handler.h"
#include "csrc/shared_memory/collective.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The states of one call site of one executable.
struct ProcessBarrierSite : SiteType<ProcessBarrierSite> {
  explicit ProcessBarrierSite(std::shared_ptr<const CallSignature> signature) : signature(std::move(signature)) {}

  std::shared_ptr<const CallSignature> signature;
};
struct ProcessCollectiveSite : SiteType<ProcessCollectiveSite> {
  explicit ProcessCollectiveSite(std::shared_ptr<const SharedCollective> call) : call(std::move(call)) {}

  std::shared_ptr<const SharedCollective> call;
};

// Once per call site: decodes the attributes program, index, repeat, call, fields, devices, processes, groups and
// is_sequential (call_signature.h), and of a collective ranks, outer and sums (collective.h).
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Of a barrier, arguments any arrays, then the device's position in the mesh; results
// the same arrays, in the same memory where XLA can arrange it. Of a collective, one array each.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
