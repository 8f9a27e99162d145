#include "csrc/hostmp/tiling/workspace.h"

#include <algorithm>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"
#include "csrc/hostmp/handles/buffers.h"

namespace jaxmp::hostmp {
namespace {

// k that lie around the cuts, at most: a unit at each cut between two of them.
int64_t depth_of_boundaries(const MatmulCall& call, const Tiling& tiling, int64_t unit) {
  const auto divides = [&](const CommonRange& cut) {
    const int64_t end = cut.begin + cut.size;
    return end < call.k && end % unit != 0;
  };
  return std::min(call.k, unit * std::count_if(tiling.k.begin(), tiling.k.end(), divides));
}

int64_t scratch_bytes(const MatmulCall& call, const Tile& tile) {
  const KernelChoice kernel = kernel_of(call, tile.cols);
  if (kernel.conversion == Conversion::kNone) return ScratchBytes(kernel, tile.rows, tile.cols, call.k);
  const bool applies = AppliesToSums(call.a.desc.type, call.b.desc.type, call.scale_a, call.scale_b);
  return ScaledGemmScratch(kernel, applies, tile.rows, tile.cols, call.k);
}

}  // namespace

KernelChoice kernel_of(const MatmulCall& call, int64_t cols) {
  const bool is_alpha_one = call.scales_last() || call.alpha == 1.0;
  return KernelOf({call.a.desc.type, call.b.desc.type, call.trans_a, cols, call.fixed_reduction_order, is_alpha_one});
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
    int64_t boundary = 0;
    if (call.fixed_reduction_order && !call.is_decoded()) {
      const int64_t depth = depth_of_boundaries(call, tiling, KUnit(kernel_of(call, tile.cols).kernel));
      boundary = boundary_bytes(call, depth, tile.rows, tile.cols);
    }
    const int64_t scratch = scratch_bytes(call, tile);
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
