// The custom call `jaxmp_matmul` as XLA sees it.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/ffi/handler.h"
#include "csrc/ffi/host_call.h"
#include "csrc/hostmp/handles/runtime.h"
#include "csrc/plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable. Its rendezvous separates calls in different places of a program; other
// sites may share the plan.
struct Site : SiteType<Site> {
  explicit Site(std::shared_ptr<Plan> plan) : plan(std::move(plan)) {}

  std::shared_ptr<Plan> plan;
  hostmp::Rendezvous rendezvous;
};

// Runs once per call site: decodes the attributes and resolves the plan.
XLA_FFI_Error* MatmulInstantiate(XLA_FFI_CallFrame* frame);

// Runs a rank's product on these buffers, with its peers at this rendezvous; without peers it is never pending.
Outcome RunProduct(const std::shared_ptr<Plan>& plan, const Buffers& buffers, hostmp::Rendezvous& rendezvous,
                   int64_t run_id, int num_threads, const GroupRank& group_rank);

// Runs once per device and execution; call_frame.h has the arguments and results.
XLA_FFI_Error* MatmulExecute(XLA_FFI_CallFrame* frame);

}  // namespace jaxmp
