// Reads and checks attributes and buffers of a call frame; every platform's handler of a product uses this.
#pragma once

#include "csrc/base/status.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

StatusOr<Attributes> ReadAttributes(const xla::ffi::Dictionary& dictionary);

// The type of a buffer; DType::kNone where no product has it.
DType DTypeOf(xla::ffi::DataType type);

// The buffers of one device, in the order of the boundary: arguments a, b, [c], [bias], [aux], [scale_a], [scale_b],
// [scale_c], [scale_d], [scale_aux], [position]; results d, [aux], [gradient], [amax_d], [amax_aux], [d_out_scale].
// `position` is null where a group has one rank, and points to one int32, wherever the platform keeps its buffers.
Status ReadOperands(const Problem& p, const Distribution& layout, const xla::ffi::RemainingArgs& args,
                    const xla::ffi::RemainingRets& rets, Buffers* buffers, const void** position);

// Where the device stands in the mesh: argument `index`, which begins with that. Programs that were exported earlier
// have an int32.
StatusOr<const void*> PositionAt(const xla::ffi::RemainingArgs& args, size_t index);

// Arguments a and b alone, and with `has_d` result d; others may follow.
Status ReadFactors(const Problem& p, const Distribution& layout, const xla::ffi::RemainingArgs& args,
                   const xla::ffi::RemainingRets& rets, bool has_d, Buffers* buffers);

}  // namespace jaxmp
