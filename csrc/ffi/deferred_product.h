// The custom calls of a product that runs while XLA goes on with the program. `jaxmp_start_product` copies the
// operands, lets a thread of ours multiply them, and returns a ticket at once; `jaxmp_collect_product` waits for that
// thread and writes D. Neither is ever pending, and neither waits for another rank.
//
// D depends only on the operands of collect, not on the ticket: without a finished product, collect multiplies. So XLA
// may repeat, merge, move or drop either call, and after a run that fails in between, our thread uses nothing that the
// run owns.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "csrc/ffi/handler.h"
#include "csrc/plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

// The state of one call site of one executable.
struct DeferredSite : SiteType<DeferredSite> {
  DeferredSite(std::shared_ptr<Plan> plan, bool keeps_a) : plan(std::move(plan)), keeps_a(keeps_a) {}

  std::shared_ptr<Plan> plan;
  bool keeps_a;  // true if a, false if b, is the same in all products of a chain
};

// Runs once per call site: decodes the attributes of jaxmp_matmul, for one rank, and `kept` ("a" or "b").
XLA_FFI_Error* DeferredInstantiate(XLA_FFI_CallFrame* frame);

// Runs once per device and execution. Arguments: a, b, the ticket of the previous product in a chain or 0 (uint64), and
// an int32. Results: a ticket, and the same int32, which XLA thus has only after the product has started.
XLA_FFI_Error* StartExecute(XLA_FFI_CallFrame* frame);

// Runs once per device and execution. Arguments: a, b, the ticket, and any array that has to exist before. Result: d.
XLA_FFI_Error* CollectExecute(XLA_FFI_CallFrame* frame);

// Frees memory that no product has used for `unused_for` seconds. Returns the bytes that are kept for the next product.
size_t TrimProducts(double unused_for);

}  // namespace jaxmp
