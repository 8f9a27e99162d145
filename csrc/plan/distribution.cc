#include "csrc/plan/distribution.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/base/limits.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/plan/enums.h"

namespace jaxmp {
namespace {

// How op(A), op(B) or D is cut: the grid of its processes, and how many of them share its rows and its columns.
struct Cut {
  GridKind grid;
  int64_t row_parts, col_parts;
};

// If the operand is transposed, the other stored dimension is cut: the shards of the ranks are then side by side.
Cut CutRows(Op op, int64_t parts) { return {op == Op::kN ? GridKind::kColumn : GridKind::kRow, parts, 1}; }
Cut CutCols(Op op, int64_t parts) { return {op == Op::kN ? GridKind::kRow : GridKind::kColumn, 1, parts}; }
Cut CutBoth(const Problem& p, Op op) {
  if (op == Op::kN) return {GridKind::kProcess, p.nprow(), p.npcol()};
  return {GridKind::kProcess, p.npcol(), p.nprow()};
}

// Returns the stored matrix X. The arguments are the extents and blocks of op(X).
MatrixDistribution Stored(const Cut& cut, Op op, int64_t rows, int64_t cols, int64_t row_block, int64_t col_block) {
  const int64_t local_rows = rows / cut.row_parts, local_cols = cols / cut.col_parts;
  if (op == Op::kN) return {cut.grid, rows, cols, row_block, col_block, 0, 0, local_rows, local_cols};
  return {cut.grid, cols, rows, col_block, row_block, 0, 0, local_cols, local_rows};
}

// cuBLASMp's block contract: op(A) and op(B) agree on k, op(A) and D on m, op(B) and D on n. If a dimension is not cut,
// any block is legal; the other matrix's block is used, so that the two agree.
Status PlaceShards(const Problem& p, const Cut& a, const Cut& b, const Cut& d, Distribution* layout) {
  const std::tuple<const char*, int64_t, int64_t> divided[] = {{"m", p.m, a.row_parts}, {"k", p.k, a.col_parts},
                                                               {"k", p.k, b.row_parts}, {"n", p.n, b.col_parts},
                                                               {"m", p.m, d.row_parts}, {"n", p.n, d.col_parts}};
  for (const auto& [name, extent, parts] : divided) {
    if (extent % parts == 0) continue;
    return InvalidArgument("jaxmp: pattern ", NameOf(p.pattern), " needs ", name, " to be a multiple of ", parts,
                           ", got ", name, "=", extent, "; pad the operands or choose another mesh");
  }
  const auto block = [](int64_t extent, int64_t own_parts, int64_t other_parts) {
    return std::max<int64_t>(1, extent / (own_parts == 1 ? other_parts : own_parts));  // at least 1, for empty matrices
  };
  layout->a =
      Stored(a, p.trans_a, p.m, p.k, block(p.m, a.row_parts, d.row_parts), block(p.k, a.col_parts, b.row_parts));
  layout->b =
      Stored(b, p.trans_b, p.k, p.n, block(p.k, b.row_parts, a.col_parts), block(p.n, b.col_parts, d.col_parts));
  layout->d = Stored(d, Op::kN, p.m, p.n, block(p.m, d.row_parts, a.row_parts), block(p.n, d.col_parts, b.col_parts));
  return {};
}

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Returns the part of the first process, which is the largest: `extent` in blocks of `block`, dealt to `nprocs`.
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

// Follows the table of cuBLASMp's algorithms.
Status PlaceMatrices(const Problem& p, Distribution* layout) {
  const int64_t P = p.nranks();
  switch (p.pattern) {
    case Pattern::kLocal:
    case Pattern::kAllGather:
      return PlaceShards(p, CutRows(p.trans_a, P), CutCols(p.trans_b, P), CutRows(Op::kN, P), layout);
    case Pattern::kReduceScatter:
      return PlaceShards(p, CutCols(p.trans_a, P), CutRows(p.trans_b, P), CutCols(Op::kN, P), layout);
    case Pattern::kAllReduce:
      JAXMP_RETURN_IF_ERROR(PlaceShards(p, CutCols(p.trans_a, P), CutRows(p.trans_b, P), CutCols(Op::kN, 1), layout));
      layout->d.cols *= P;  // every rank holds all of D, which are P copies side by side to cuBLASMp
      return {};
    case Pattern::kGrid:
      if (p.is_block_cyclic()) return PlaceCyclic(p, layout);
      return PlaceShards(p, CutBoth(p, p.trans_a), CutBoth(p, p.trans_b), CutBoth(p, Op::kN), layout);
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
  const bool is_relu = p.has_relu();
  const std::string epilog = "jaxmp: epilog " + std::to_string(p.epilog);
  if (p.epilog & abi::CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE) {
    return InvalidArgument(epilog, " has the ALLREDUCE bit, which belongs to pattern all_reduce");
  }
  if (p.needs_bias() != (p.dtype_bias != DType::kNone)) {
    return InvalidArgument(epilog, (p.needs_bias() ? " needs" : " takes no"), " bias, but dtype_bias is ",
                           NameOf(p.dtype_bias));
  }
  // A mask has bits, another aux has numbers; the library checks their type.
  if (p.needs_aux() != p.has_aux() || (p.needs_aux() && is_relu != (p.dtype_aux == DType::kU8))) {
    return InvalidArgument(epilog,
                           !p.needs_aux() ? " takes no aux"
                           : is_relu      ? " needs dtype_aux u8"
                                          : " needs an aux",
                           ", got dtype_aux ", NameOf(p.dtype_aux));
  }
  if (p.has_gradient() && (p.m == 0 || p.n == 0)) {
    return InvalidArgument(epilog,
                           " sums to a bias gradient, but D has no elements; write the gradient without a call");
  }
  if (p.needs_bias()) {
    layout->bias_size = p.epilog == kBgradB ? p.n : layout->d.local_rows;
  }
  if (p.needs_aux()) {
    const int64_t rows = layout->d.local_rows;
    // RELU_AUX: one bit for an element, columns padded to 16 bytes. GELU_AUX: D's type, columns padded to 8 elements.
    layout->aux.attribute_ld = RoundUp(rows, is_relu ? 128 : 8);
    layout->aux.local_size = layout->aux.attribute_ld / (is_relu ? 8 : 1) * layout->d.local_cols;
  }
  return {};
}

// Counts the scales of one rank's part, `inner` along k in A and B and along the rows of D (cuBLAS documentation, "1D
// Block Scaling Factors Distribution", "Scaling factors layouts"): tiles of 128 x 4 for blocks of 16 and 32.
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
