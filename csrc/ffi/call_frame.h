// Reads and checks attributes and buffers of a call frame; every platform's handler of a product uses this.
#pragma once

#include "csrc/base/status.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

StatusOr<Attributes> ReadAttributes(const xla::ffi::Dictionary& dictionary);

// Returns the type of a buffer; DType::kNone if no product takes it.
DType DTypeOf(xla::ffi::DataType type);

// Reads the buffers of one device, in the boundary's order: arguments a, b, [c], [bias], [aux], [scale_a], [scale_b],
// [scale_c], [scale_d], [scale_aux], [position]; results d, [aux], [gradient], [amax_d], [amax_aux], [d_out_scale].
// `position` is null with one rank or with named devices; else one int32 in the platform's memory.
Status ReadOperands(const Problem& p, const Distribution& layout, const xla::ffi::RemainingArgs& args,
                    const xla::ffi::RemainingRets& rets, Buffers* buffers, const void** position);

// Returns the device's position in the mesh: the first number of argument `index`, a uint32. Programs that were
// exported earlier have an int32.
StatusOr<const void*> PositionAt(const xla::ffi::RemainingArgs& args, size_t index);

// Reads only arguments a and b and, with `has_d`, result d; others may follow.
Status ReadFactors(const Problem& p, const Distribution& layout, const xla::ffi::RemainingArgs& args,
                   const xla::ffi::RemainingRets& rets, bool has_d, Buffers* buffers);

}  // namespace jaxmp
