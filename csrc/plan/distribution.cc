#include "csrc/plan/distribution.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/limits.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/plan/enums.h"

namespace jaxmp {
namespace {

// How many parts a matrix is cut into, along each of its stored dimensions, to get one rank's part and to get a block.
struct BlockCounts {
  int64_t local_rows, local_cols;
  int64_t block_rows, block_cols;
};

MatrixDistribution MakeMatrix(GridKind grid, int64_t rows, int64_t cols, const BlockCounts& cut) {
  // An empty matrix still has a block size.
  const int64_t row_block = std::max<int64_t>(1, rows / cut.block_rows);
  const int64_t col_block = std::max<int64_t>(1, cols / cut.block_cols);
  return {grid, rows, cols, row_block, col_block, 0, 0, rows / cut.local_rows, cols / cut.local_cols};
}

// A stored operand whose `rows` (of op(X)) are cut into `parts` and whose columns are whole. Transposed, it is the
// stored columns that are cut: the shards of the ranks are then side by side.
MatrixDistribution SplitRows(Op op, int64_t rows, int64_t cols, int64_t parts, int64_t col_blocks) {
  if (op == Op::kN) return MakeMatrix(GridKind::kColumn, rows, cols, {parts, 1, parts, col_blocks});
  return MakeMatrix(GridKind::kRow, cols, rows, {1, parts, col_blocks, parts});
}

MatrixDistribution SplitCols(Op op, int64_t rows, int64_t cols, int64_t parts, int64_t row_blocks) {
  if (op == Op::kN) return MakeMatrix(GridKind::kRow, rows, cols, {1, parts, row_blocks, parts});
  return MakeMatrix(GridKind::kColumn, cols, rows, {parts, 1, parts, row_blocks});
}

// Into how many blocks a dimension is cut: as many as processes share it; where it is whole, any number is legal, and
// the other matrix's number along the same dimension makes the two agree.
int64_t BlocksOf(int64_t own_parts, int64_t other_parts) { return own_parts == 1 ? other_parts : own_parts; }

// A stored operand on the process grid; `row_blocks` and `col_blocks` cut op(X).
MatrixDistribution SplitBoth(const Problem& p, Op op, int64_t rows, int64_t cols, int64_t row_blocks,
                             int64_t col_blocks) {
  if (op == Op::kN) return MakeMatrix(GridKind::kProcess, rows, cols, {p.nprow(), p.npcol(), row_blocks, col_blocks});
  return MakeMatrix(GridKind::kProcess, cols, rows, {p.nprow(), p.npcol(), col_blocks, row_blocks});
}

void PlaceOnGrid(const Problem& p, Distribution* layout) {
  const int64_t nprow = p.nprow(), npcol = p.npcol();
  const bool a_is_n = p.trans_a == Op::kN, b_is_n = p.trans_b == Op::kN;
  const int64_t a_m = a_is_n ? nprow : npcol, a_k = a_is_n ? npcol : nprow;
  const int64_t b_k = b_is_n ? nprow : npcol, b_n = b_is_n ? npcol : nprow;
  layout->a = SplitBoth(p, p.trans_a, p.m, p.k, BlocksOf(a_m, nprow), BlocksOf(a_k, b_k));
  layout->b = SplitBoth(p, p.trans_b, p.k, p.n, BlocksOf(b_k, a_k), BlocksOf(b_n, npcol));
  layout->d = SplitBoth(p, Op::kN, p.m, p.n, BlocksOf(nprow, a_m), BlocksOf(npcol, b_n));
}

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// What the process that comes first holds, and no process holds more: `extent` in blocks of `block`, dealt to `nprocs`.
int64_t LargestPart(int64_t extent, int64_t block, int64_t nprocs) {
  const int64_t cycle = block * nprocs;
  return extent / cycle * block + std::min(block, extent % cycle);
}

MatrixDistribution MakeCyclic(const Problem& p, int64_t rows, int64_t cols, const std::vector<int64_t>& layout) {
  const int64_t local_rows = LargestPart(rows, layout[0], p.nprow());
  const int64_t local_cols = LargestPart(cols, layout[1], p.npcol());
  return {GridKind::kProcess, rows, cols, layout[0], layout[1], layout[2], layout[3], local_rows, local_cols};
}

Status PlaceCyclic(const Problem& p, Distribution* layout) {
  if (p.epilog != 0) {
    return Unimplemented("jaxmp: block-cyclic layouts take no epilog, got epilog ", p.epilog);
  }
  const bool a_is_n = p.trans_a == Op::kN, b_is_n = p.trans_b == Op::kN;
  layout->a = MakeCyclic(p, a_is_n ? p.m : p.k, a_is_n ? p.k : p.m, p.layout_a);
  layout->b = MakeCyclic(p, b_is_n ? p.k : p.n, b_is_n ? p.n : p.k, p.layout_b);
  layout->d = MakeCyclic(p, p.m, p.n, p.layout_d);
  return {};
}

Status CheckDivides(const Problem& problem, const char* name, int64_t extent, int64_t parts) {
  if (extent % parts == 0) return {};
  return InvalidArgument("jaxmp: pattern ", NameOf(problem.pattern), " needs ", name, " to be a multiple of ", parts,
                         ", got ", name, "=", extent, "; pad the operands or choose another mesh");
}

Status CheckGrid(const Problem& p) {
  const int64_t nprow = p.nprow(), npcol = p.npcol();
  JAXMP_RETURN_IF_ERROR(CheckDivides(p, "m", p.m, p.trans_a == Op::kN ? nprow : npcol));
  JAXMP_RETURN_IF_ERROR(CheckDivides(p, "k", p.k, p.trans_a == Op::kN ? npcol : nprow));
  JAXMP_RETURN_IF_ERROR(CheckDivides(p, "k", p.k, p.trans_b == Op::kN ? nprow : npcol));
  JAXMP_RETURN_IF_ERROR(CheckDivides(p, "n", p.n, p.trans_b == Op::kN ? npcol : nprow));
  JAXMP_RETURN_IF_ERROR(CheckDivides(p, "m", p.m, nprow));  // D
  return CheckDivides(p, "n", p.n, npcol);
}

// The table of cuBLASMp's 1-D algorithms, in terms of op(A) (m×k), op(B) (k×n) and D (m×n). Where a dimension is not
// split, its block is chosen to satisfy cuBLASMp's block contract: op(A) and op(B) agree on k, op(A) and D on m,
// op(B) and D on n.
Status PlaceMatrices(const Problem& p, Distribution* layout) {
  const int64_t P = p.nranks();
  switch (p.pattern) {
    case Pattern::kLocal:
      layout->a = SplitRows(p.trans_a, p.m, p.k, 1, 1);
      layout->b = SplitCols(p.trans_b, p.k, p.n, 1, 1);
      layout->d = SplitRows(Op::kN, p.m, p.n, 1, 1);
      return {};
    case Pattern::kAllGather:
      JAXMP_RETURN_IF_ERROR(CheckDivides(p, "m", p.m, P));
      JAXMP_RETURN_IF_ERROR(CheckDivides(p, "n", p.n, P));
      layout->a = SplitRows(p.trans_a, p.m, p.k, P, 1);
      layout->b = SplitCols(p.trans_b, p.k, p.n, P, 1);
      layout->d = SplitRows(Op::kN, p.m, p.n, P, P);
      return {};
    case Pattern::kReduceScatter:
      JAXMP_RETURN_IF_ERROR(CheckDivides(p, "k", p.k, P));
      JAXMP_RETURN_IF_ERROR(CheckDivides(p, "n", p.n, P));
      layout->a = SplitCols(p.trans_a, p.m, p.k, P, 1);
      layout->b = SplitRows(p.trans_b, p.k, p.n, P, P);
      layout->d = SplitCols(Op::kN, p.m, p.n, P, 1);
      return {};
    case Pattern::kAllReduce:
      JAXMP_RETURN_IF_ERROR(CheckDivides(p, "k", p.k, P));
      layout->a = SplitCols(p.trans_a, p.m, p.k, P, 1);
      layout->b = SplitRows(p.trans_b, p.k, p.n, P, 1);
      // Every rank holds all of D: to cuBLASMp, P copies side by side.
      layout->d = SplitCols(Op::kN, p.m, p.n * P, P, 1);
      return {};
    case Pattern::kGrid:
      if (p.is_block_cyclic()) return PlaceCyclic(p, layout);
      JAXMP_RETURN_IF_ERROR(CheckGrid(p));
      PlaceOnGrid(p, layout);
      return {};
  }
  return Internal("jaxmp: unknown pattern");
}

Status CheckSizes(const Distribution& layout) {
  const std::pair<const char*, const MatrixDistribution*> matrices[] = {
      {"A", &layout.a}, {"B", &layout.b}, {"D", &layout.d}};
  for (const auto& [name, matrix] : matrices) {
    if (Fits(matrix->local_rows, matrix->local_cols, kMostElements)) continue;
    return InvalidArgument("jaxmp: ", name, " has ", matrix->local_rows, "x", matrix->local_cols,
                           " elements on each device, more than 2^44");
  }
  return {};
}

Status PlaceEpilog(const Problem& p, Distribution* layout) {
  const bool is_relu = p.epilog & (2 | 8);
  const bool wants_bias = (p.epilog & abi::CUBLASMP_MATMUL_EPILOGUE_BIAS) || p.has_gradient();
  const bool wants_aux = p.epilog & 128;
  const std::string epilog = "jaxmp: epilog " + std::to_string(p.epilog);
  if (p.epilog & abi::CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE) {
    return InvalidArgument(epilog, " has the ALLREDUCE bit, which belongs to pattern all_reduce");
  }
  if (wants_bias != (p.dtype_bias != DType::kNone)) {
    return InvalidArgument(epilog, (wants_bias ? " needs" : " takes no"), " bias, but dtype_bias is ",
                           NameOf(p.dtype_bias));
  }
  // A mask has bits, another aux numbers; the library judges their type.
  if (wants_aux != p.has_aux() || (wants_aux && is_relu != (p.dtype_aux == DType::kU8))) {
    return InvalidArgument(epilog,
                           !wants_aux ? " takes no aux"
                           : is_relu  ? " needs dtype_aux u8"
                                      : " needs an aux",
                           ", got dtype_aux ", NameOf(p.dtype_aux));
  }
  if (p.has_gradient() && (p.m == 0 || p.n == 0)) {
    return InvalidArgument(epilog,
                           " sums to a bias gradient, but D has no elements; write the gradient without a call");
  }
  if (wants_bias) {
    const bool is_of_b = p.epilog == abi::CUBLASMP_MATMUL_EPILOGUE_BGRADB;
    layout->bias_size = is_of_b ? p.n : layout->d.local_rows;
  }
  if (wants_aux) {
    const int64_t rows = layout->d.local_rows;
    // RELU_AUX: one bit an element, columns padded to 16 bytes. GELU_AUX: D's type, columns padded to 8 elements.
    layout->aux.attribute_ld = RoundUp(rows, is_relu ? 128 : 8);
    layout->aux.local_size = layout->aux.attribute_ld / (is_relu ? 8 : 1) * layout->d.local_cols;
  }
  return {};
}

// Of one rank's part of a matrix, `inner` along k in A and B and along the rows of D (cuBLAS documentation, "1D Block
// Scaling Factors Distribution" and "Scaling factors layouts"): tiles of 128 x 4 for blocks of 16 and 32.
int64_t ScaleSize(ScaleMode mode, int64_t inner, int64_t outer) {
  const auto blocks = [](int64_t extent, int64_t block) { return RoundUp(extent, block) / block; };
  switch (mode) {
    case ScaleMode::kNone:
      return 0;
    case ScaleMode::kScalar:
      return 1;
    case ScaleMode::kVec16:
      return RoundUp(blocks(inner, 16), 4) * RoundUp(outer, 128);
    case ScaleMode::kVec32:
      return RoundUp(blocks(inner, 32), 4) * RoundUp(outer, 128);
    case ScaleMode::kOuterVec:
      return outer;
    case ScaleMode::kVec128:
      return blocks(inner, 128) * outer;
    case ScaleMode::kBlk128:
      return RoundUp(blocks(inner, 128), 4) * blocks(outer, 128);
  }
  return 0;
}

void PlaceScales(const Problem& p, Distribution* layout) {
  const bool is_t = p.trans_a != Op::kN, is_n = p.trans_b == Op::kN;
  const auto size = [](ScaleMode mode, const MatrixDistribution& x, bool is_inner_row) {
    return is_inner_row ? ScaleSize(mode, x.local_rows, x.local_cols) : ScaleSize(mode, x.local_cols, x.local_rows);
  };
  layout->scales.a = size(p.scale_mode_a, layout->a, is_t);
  layout->scales.b = size(p.scale_mode_b, layout->b, is_n);
  layout->scales.c = ScaleSize(p.scale_mode_c, 1, 1);
  layout->scales.d = ScaleSize(p.scale_mode_d, 1, 1);
  layout->scales.aux = ScaleSize(p.scale_mode_aux, 1, 1);
  layout->scales.d_out = size(p.d_out_scale_mode, layout->d, true);
}

}  // namespace

StatusOr<Distribution> MakeDistribution(const Problem& problem) {
  Distribution layout;
  JAXMP_RETURN_IF_ERROR(PlaceMatrices(problem, &layout));
  JAXMP_RETURN_IF_ERROR(CheckSizes(layout));
  JAXMP_RETURN_IF_ERROR(PlaceEpilog(problem, &layout));
  PlaceScales(problem, &layout);
  return layout;
}

}  // namespace jaxmp
