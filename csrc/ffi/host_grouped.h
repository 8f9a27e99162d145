// The custom call `jaxmp_grouped` as XLA sees it: products of groups of rows, on host memory.
#pragma once

#include <memory>

#include "csrc/ffi/handler.h"
#include "csrc/hostmp/handles/runtime.h"
#include "csrc/plan/communicator.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of a call site: its attributes, and where its ranks meet.
struct GroupedSite : SiteType<GroupedSite> {
  int64_t is_contraction = 0, is_transposed = 0, is_fixed_order = 0;
  std::shared_ptr<const Communicator> communicator;
  hostmp::Rendezvous rendezvous;
};

// Runs once per call site: decodes the attributes is_contraction, is_transposed and is_fixed_order (grouped.h);
// mesh_shape and axes_row, as in Axes (communicator.h).
XLA_FFI_Error* GroupedInstantiate(XLA_FFI_CallFrame* frame);

// Runs once per device and execution. Arguments: x, w and bounds, with a batch in front (1 to serve the whole batch);
// in calls of several ranks also the device's position in the mesh. Result: d.
XLA_FFI_Error* GroupedExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
