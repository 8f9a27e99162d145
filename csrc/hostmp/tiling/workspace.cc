#include "csrc/hostmp/tiling/workspace.h"

#include <algorithm>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/rounded_gemm.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"
#include "csrc/hostmp/handles/buffers.h"
#include "csrc/hostmp/kernels/simd_gemm.h"

namespace jaxmp::hostmp {
namespace {

// k that lie around the cuts, at most: a unit at each cut between two of them.
int64_t depth_of_boundaries(const MatmulCall& call, const Tiling& tiling) {
  const int64_t unit = k_unit(call.a.desc.type);
  const auto divides = [&](const CommonRange& cut) {
    const int64_t end = cut.begin + cut.size;
    return end < call.k && end % unit != 0;
  };
  return std::min(call.k, unit * std::count_if(tiling.k.begin(), tiling.k.end(), divides));
}

}  // namespace

bool is_own_product(const MatmulCall& call, int64_t cols) {
  if (call.is_decoded() || rounds_operands(call.compute)) return false;
  const abi::cudaDataType_t type = call.a.desc.type;
  return (type == abi::CUDA_R_32F || type == abi::CUDA_R_64F) && takes_simd_gemm(type, call.trans_a, cols);
}

bool sums_in_d(const MatmulCall& call, const Tiling& tiling, const Tile& tile) {
  const bool reads_c_last = call.scales_last() && call.has_c;
  return call.accumulator() == call.d.desc.type && !reads_c_last && tiling.is_together_in_d(tile);
}

int64_t boundary_bytes(const MatmulCall& call, int64_t depth, int64_t rows, int64_t cols) {
  return depth * facts(call.a.desc.type).bytes * (rows + cols);
}

Area area_of(const MatmulCall& call, const Tiling& tiling) {
  const abi::cudaDataType_t type = call.a.desc.type;
  Area area;
  for (const Tile& tile : tiling.tiles) {
    const int64_t sums = sums_in_d(call, tiling, tile) ? 0 : facts(call.accumulator()).bytes * tile.rows * tile.cols;
    area.sums_bytes = std::max(area.sums_bytes, round_up(sums, kAlignment));
    int64_t scratch = 0, boundary = 0;
    if (call.is_decoded()) {
      const bool has_sums = call.is_low_precision() && applies_to_sums(type, call.scale_a, call.scale_b);
      scratch = scaled_gemm_scratch(type, call.b.desc.type, has_sums, call.fixed_reduction_order, tile.rows, tile.cols,
                                    call.k);
    } else if (call.fixed_reduction_order) {
      scratch = fixed_order_gemm_scratch(type, tile.rows, tile.cols, call.k);
      boundary = boundary_bytes(call, depth_of_boundaries(call, tiling), tile.rows, tile.cols);
    } else if (rounds_operands(call.compute)) {
      scratch = rounded_gemm_scratch(call.compute, type, tile.rows, tile.cols, call.k);
    } else if (facts(type).is_16bit) {
      scratch = gemm16_scratch(type, tile.rows, tile.cols, call.k);
    } else if (is_own_product(call, tile.cols) && (tile.cols > kSmallN || call.trans_a != abi::CUBLAS_OP_N)) {
      scratch = simd_gemm_scratch(simd_level(), type, tile.rows, tile.cols, call.k);
    }
    const bool is_copied = !call.is_decoded() && !tiling.is_together_in_b(tile);
    const int64_t pieces = is_copied ? facts(type).bytes * tile.cols * call.k : 0;
    area.gathered_bytes = std::max(area.gathered_bytes, round_up(pieces, kAlignment));
    area.scratch_bytes = std::max(area.scratch_bytes, round_up(scratch, kAlignment));
    area.boundary_bytes = std::max(area.boundary_bytes, round_up(boundary, kAlignment));
  }
  return area;
}

int64_t areas_per_rank(const MatmulCall& call) { return ceil_div(machine_threads(), call.nranks); }

int64_t workspace_bytes(const MatmulCall& call, const Area& area) {
  if (area.bytes() == 0) return 0;
  return areas_per_rank(call) * area.bytes() + kAlignment;  // the caller's pointer may lie anywhere
}

}  // namespace jaxmp::hostmp
