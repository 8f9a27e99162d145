// How one product is distributed over a group's ranks: the distribution that each pattern gives to A, B and D, in
// cuBLASMp's column-major terms. Integers only; plan.cc makes the objects.
#pragma once

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

// The grids over the P ranks of a communicator. In the first two, rank r is process row or column r.
enum class GridKind : uint8_t {
  kColumn,   // P × 1, column-major: splits rows
  kRow,      // 1 × P, row-major: splits columns
  kProcess,  // nprow × npcol, column-major: splits both
};

// One stored matrix: its global extents, its blocks, and the part that every rank holds.
//
// Example: all_gather on 4 ranks, D of 8×12: kColumn, blocks 2×3, so each rank holds 2×12. The 3 splits nothing (the
// grid has one column); it is there because cuBLASMp wants D's column blocks to equal B's, which are 12/4 wide.
struct MatrixDistribution {
  GridKind grid = GridKind::kColumn;
  int64_t rows = 0, cols = 0;
  int64_t row_block = 1, col_block = 1;
  int64_t row_source = 0, col_source = 0;  // the process row and column with the first block
  int64_t local_rows = 0, local_cols = 0;  // block-cyclic: the largest part of any rank, which all ranks allocate

  int64_t local_size() const { return local_rows * local_cols; }
};

// The auxiliary matrix of an epilog, for one rank's part of D; zero if there is none.
struct AuxLayout {
  int64_t attribute_ld = 0;  // as cuBLASMp counts it: bits for the RELU mask, elements for GELU
  int64_t local_size = 0;    // elements of the buffer
};

// How many numbers scale a matrix on each rank, in the order of cuBLASLt's layouts; 0 without scales.
struct ScaleSizes {
  int64_t a = 0, b = 0, c = 0, d = 0, aux = 0, d_out = 0;
};

struct Distribution {
  MatrixDistribution a, b, d;  // C is distributed as D is
  int64_t bias_size = 0;       // of the bias, or of its gradient
  AuxLayout aux;
  ScaleSizes scales;
};

// Returns an error for extents that the ranks do not divide, and for epilogs that do not match the operands.
StatusOr<Distribution> MakeDistribution(const Problem& problem);

}  // namespace jaxmp
