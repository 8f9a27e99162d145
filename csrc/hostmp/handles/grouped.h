// Products of groups of rows (`jaxmp.ragged_dot`), cut into one list of tiles that threads take one by one.
#pragma once

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {

// One rank's arguments. All arrays are row-major and dense. Group i has the rows [bounds[i], bounds[i + 1]) of x,
// clipped to [0, m).
//   rows         x (batch, m, k), w (batch, matrices, k, n) or, if `is_transposed`, (batch, matrices, n, k), d (batch,
//                m, n): each row times the matrix of its group; rows outside all groups are zero
//   contraction  x (batch, m, k), w (batch, m, n), d (batch, matrices, k, n): x^T w of the rows of each group
// Each rank has rows of all groups but only its own matrices: the first rank has the matrices of the first `matrices`
// groups. Rows are read and written in place. A sum over the rows of a group takes them in the order of the ranks.
struct GroupedProduct {
  bool is_contraction, is_transposed;
  bool is_fixed_order;                    // as in ProductKind
  abi::cudaDataType_t type, type_w, out;  // of x, w and d; when multiplying rows, w may be narrow and is then decoded
  int64_t batch, matrices, m, k, n;
  bool has_x_batch, has_w_batch, has_bounds_batch;  // if false, one serves the whole batch
  const void *x, *w;
  const int32_t* bounds;
  void* d;
};

// Rows of the largest group and of the mean group, summed over all products of several groups since the last call of
// TakeGroupRows().
struct GroupRows {
  double largest = 0, mean = 0;
};
GroupRows TakeGroupRows();

// Records the arrival of a rank. The stream is told when all of d is written, or why not, as by Matmul (runtime.h). All
// arrays must stay valid until then.
Status MultiplyGroups(const GroupedProduct& product, Stream& stream, int rank, int nranks);

}  // namespace jaxmp::hostmp
