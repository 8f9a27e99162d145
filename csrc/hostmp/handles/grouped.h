// Products of groups of rows (`jaxmp.ragged_dot`) on one device: one list of tiles, which threads take one by one.
#pragma once

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"

namespace jaxmp::hostmp {

// All arrays are row-major and dense. Group i has the rows [bounds[i], bounds[i + 1]) of x, cut to [0, m).
//   rows         x (batch, m, k), w (batch, groups, k, n) or, `is_transposed`, (batch, groups, n, k), d (batch, m, n):
//                each row times the matrix of its group; rows outside of all groups are zero
//   contraction  x (batch, m, k), w (batch, m, n), d (batch, groups, k, n): x^T w of the rows of each group
struct GroupedProduct {
  bool is_contraction, is_transposed;
  bool is_fixed_order;            // as in ProductKind
  abi::cudaDataType_t type, out;  // of x and w; of d
  int64_t batch, groups, m, k, n;
  bool has_x_batch, has_w_batch, has_bounds_batch;  // else one serves the whole batch
  const void *x, *w;
  const int32_t* bounds;
  void* d;
};

// Returns when d is written. At most `most_threads` threads work, this one among them.
Status MultiplyGroups(const GroupedProduct& product, int most_threads);

}  // namespace jaxmp::hostmp
