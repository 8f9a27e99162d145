// The custom calls of a product that goes on while XLA runs the program: `jaxmp_start_product` copies the operands, has
// a thread of ours multiply them, and gives a ticket at once; `jaxmp_collect_product` waits for that thread and writes
// D. Neither is ever pending, and neither waits for another rank.
//
// D depends only on the operands of collect, not on the ticket: without a finished product, collect multiplies.
// So XLA may repeat, merge, move or leave out either of them, and a run that fails in between leaves nothing that it
// owns to our thread.
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
  bool keeps_a;  // whether a, else b, is the same in all products of a chain
};

// Once per call site: decodes the attributes of jaxmp_matmul, of one rank, and `kept` ("a" or "b").
XLA_FFI_Error* DeferredInstantiate(XLA_FFI_CallFrame* frame);

// Once per device and execution. Arguments a, b, the ticket of the product ahead in a chain or 0 (uint64), and an
// int32; results a ticket, and that int32, which XLA then has only once the product is under way.
XLA_FFI_Error* StartExecute(XLA_FFI_CallFrame* frame);

// Arguments a, b, the ticket, and any array, which has to be there first; result d.
XLA_FFI_Error* CollectExecute(XLA_FFI_CallFrame* frame);

// Gives back memory that no product has used for so many seconds; how many bytes are kept for the next one.
size_t TrimProducts(double unused_for);

}  // namespace jaxmp
