// The custom calls between processes: `jaxmp_process_barrier` gives its operands once every process of the group has
// come; `jaxmp_process_collective` is a collective of a group that shares memory between its processes.
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
// A whole collective, which is pending until all have come; or one half, between which XLA brings the tokens round.
enum class CollectivePart { kAll, kWrite, kRead };
struct ProcessCollectiveSite : SiteType<ProcessCollectiveSite> {
  ProcessCollectiveSite(std::shared_ptr<const SharedCollective> call, CollectivePart part)
      : call(std::move(call)), part(part) {}

  std::shared_ptr<const SharedCollective> call;
  CollectivePart part;
};

// Once per call site: decodes the attributes program, index, repeat, call, fields, devices, processes, groups and
// is_sequential (call_signature.h), and of a collective ranks, outer, sums and picks (collective.h) and part ("all",
// "write" or "read").
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Of a barrier, arguments any arrays, then the device's position in the mesh; results
// the same arrays, in the same memory where XLA can arrange it. Of a collective, one array each; of "write", the result
// is the place of what was written, its token and the run, as uint64; of "read", the places of the group by rank follow
// the array. A collective that picks rows takes the two tables of `Picks` before the position.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
