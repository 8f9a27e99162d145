// Products of groups of rows (`jaxmp.ragged_dot`): one list of tiles, which threads take one by one.
#pragma once

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

// What one rank of the call passes. All arrays are row-major and dense. Group i has the rows [bounds[i], bounds[i + 1])
// of x, cut to [0, m).
//   rows         x (batch, m, k), w (batch, matrices, k, n) or, `is_transposed`, (batch, matrices, n, k), d (batch, m,
//                n): each row times the matrix of its group; rows outside of all groups are zero
//   contraction  x (batch, m, k), w (batch, m, n), d (batch, matrices, k, n): x^T w of the rows of each group
// Each rank has rows of all groups, and the matrices of its own: the first `matrices` groups are the first rank's. Rows
// are read, and written, where they lie. A sum over the rows of a group takes them in the order of the ranks.
struct GroupedProduct {
  bool is_contraction, is_transposed;
  bool is_fixed_order;                    // as in ProductKind
  abi::cudaDataType_t type, type_w, out;  // of x, of w and of d; beside rows w may be narrow, and is decoded
  int64_t batch, matrices, m, k, n;
  bool has_x_batch, has_w_batch, has_bounds_batch;  // else one serves the whole batch
  const void *x, *w;
  const int32_t* bounds;
  void* d;
};

// Of all products of several groups since the last call of this: the rows of their largest groups, and of their mean
// ones.
struct GroupRows {
  double largest = 0, mean = 0;
};
GroupRows TakeGroupRows();

// The arrival of a rank. The stream hears when all of d is written, or why not, as from Matmul (runtime.h). All arrays
// must stay until then.
Status MultiplyGroups(const GroupedProduct& product, Stream& stream, int rank, int nranks);

}  // namespace jaxmp::hostmp
