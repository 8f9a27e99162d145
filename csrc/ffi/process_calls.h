// The custom calls between processes: `jaxmp_process_barrier` returns its operands once every process of the group has
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
// A whole collective, pending until all have come; or one half of it: XLA exchanges the tokens between the halves.
enum class CollectivePart { kAll, kWrite, kRead };
struct ProcessCollectiveSite : SiteType<ProcessCollectiveSite> {
  ProcessCollectiveSite(std::shared_ptr<const SharedCollective> call, CollectivePart part)
      : call(std::move(call)), part(part) {}

  std::shared_ptr<const SharedCollective> call;
  CollectivePart part;
};

// Run once per call site: decode the attributes program, index, repeat, call, fields, devices, processes, groups and
// is_sequential (call_signature.h), and for a collective ranks, outer, sums and picks (collective.h) and part ("all",
// "write" or "read").
XLA_FFI_Error* ProcessBarrierInstantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveInstantiate(XLA_FFI_CallFrame* frame);

// Run once per device and execution. A barrier takes any arrays, then the device's position in the mesh, and returns
// the same arrays, in the same memory if XLA can arrange it. A collective takes an array and the position and returns
// an array. "write" returns the place of what was written, its token and the run, as uint64; "read" takes the places of
// the group by rank after the array. A collective that picks rows takes the two tables of `Picks` before the position.
XLA_FFI_Error* ProcessBarrierExecute(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ProcessCollectiveExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
