#include "csrc/hostmp/tiling/product_tiling.h"

#include <algorithm>
#include <tuple>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"

namespace jaxmp::hostmp {
namespace {

TilingKey KeyOf(const MatmulCall& call) {
  TilingKey key;
  size_t count = 0;
  const auto add = [&](auto... values) { ((key[count++] = static_cast<int64_t>(values)), ...); };
  add(call.m, call.n, call.k, call.trans_a, call.trans_b, call.compute, call.is_all_reduce, call.fixed_reduction_order);
  add(call.has_c, call.scale_a.mode, call.scale_b.mode, call.has_d_out_scale, call.d_out_scale.mode, call.nranks);
  for (const Operand* x : {&call.a, &call.b, &call.d}) {
    add(x->desc.type, x->row, x->col);
    for (const Axis& axis : {x->desc.rows, x->desc.cols}) add(axis.extent, axis.block, axis.nprocs, axis.source);
  }
  static_assert(std::tuple_size_v<TilingKey> == 14 + 3 * (3 + 2 * 4));
  return key;
}

// An upper bound of the k around cuts: one unit for each cut of k that is not a multiple of the unit.
int64_t DepthOfBoundaries(const MatmulCall& call, const Tiling& tiling, int64_t unit) {
  const auto divides = [&](const CommonRange& cut) {
    const int64_t end = cut.begin + cut.size;
    return end < call.k && end % unit != 0;
  };
  return std::min(call.k, unit * std::count_if(tiling.k.begin(), tiling.k.end(), divides));
}

int64_t ScratchBytes(const MatmulCall& call, const Tile& tile, const KernelChoice& kernel) {
  if (kernel.conversion == Conversion::kNone) return ScratchBytes(kernel, tile.rows, tile.cols, call.k);
  const bool scales_sums = ScalesSums(call.scale_a.mode) || ScalesSums(call.scale_b.mode);
  return ScaledGemmScratch(kernel, scales_sums, tile.rows, tile.cols, call.k);
}

// Makes the area large enough for the tiling. `is_one_matrix`: B is A.
void Extend(const MatmulCall& call, const Tiling& tiling, bool is_one_matrix, Area* to) {
  const abi::cudaDataType_t type = call.a.desc.type;
  Area& area = *to;
  for (const Tile& tile : tiling.tiles) {
    const KernelChoice kernel = KernelOf(call, tile.cols, is_one_matrix);
    const int64_t sums = SumsInD(call, tiling, tile) ? 0 : Facts(call.accumulator()).bytes * tile.rows * tile.cols;
    area.sums_bytes = std::max(area.sums_bytes, RoundUp(sums, kAlignment));
    int64_t boundary = 0;
    if (call.fixed_reduction_order && !call.is_decoded()) {
      const int64_t depth = DepthOfBoundaries(call, tiling, KUnit(kernel.kernel));
      boundary = depth * Facts(type).bytes * (tile.rows + tile.cols);
    }
    const int64_t scratch = ScratchBytes(call, tile, kernel);
    const bool is_copied = !call.is_decoded() && !tiling.IsTogetherInB(tile);
    const int64_t pieces = is_copied ? Facts(type).bytes * tile.cols * call.k : 0;
    area.gathered_bytes = std::max(area.gathered_bytes, RoundUp(pieces, kAlignment));
    area.scratch_bytes = std::max(area.scratch_bytes, RoundUp(scratch, kAlignment));
    area.boundary_bytes = std::max(area.boundary_bytes, RoundUp(boundary, kAlignment));
  }
}

int64_t AreasPerRank(const MatmulCall& call) { return CeilDiv(machine_threads(), call.nranks); }

int64_t WorkspaceBytes(const MatmulCall& call, const Area& area) {
  if (area.bytes() == 0) return 0;
  return AreasPerRank(call) * area.bytes() + kAlignment;  // the caller's pointer may have any alignment
}

}  // namespace

KernelChoice KernelOf(const MatmulCall& call, int64_t cols, bool is_one_matrix) {
  const bool is_alpha_one = call.scales_last() || call.alpha == 1.0;
  // Sums in one fixed order make D symmetric to the bit, which a BLAS does not guarantee.
  const bool is_fixed_order = call.fixed_reduction_order || is_one_matrix;
  return KernelOf({call.a.desc.type, call.b.desc.type, call.trans_a, cols, is_fixed_order, is_alpha_one});
}

bool SumsInD(const MatmulCall& call, const Tiling& tiling, const Tile& tile) {
  const bool reads_c_last = call.scales_last() && call.has_c;
  return call.accumulator() == call.d.desc.type && !reads_c_last && tiling.IsTogetherInD(tile);
}

std::shared_ptr<const ProductTiling> TilingOf(const MatmulCall& call, abi::cublasMpMatmulDescriptor* desc) {
  const TilingKey key = KeyOf(call);
  std::shared_ptr<const ProductTiling> tiling = std::atomic_load(&desc->tiling);
  if (tiling && tiling->key == key) return tiling;
  const auto made = std::make_shared<ProductTiling>();
  made->key = key;
  made->tiling = MakeTiling(call);
  made->symmetric = MakeSymmetricTiling(call);
  Extend(call, made->tiling, /*is_one_matrix=*/false, &made->area);
  if (call.may_be_symmetric()) {
    for (const Tiling* each : {&made->tiling, &made->symmetric}) Extend(call, *each, true, &made->area);
  }
  made->workspace_bytes = WorkspaceBytes(call, made->area);
  tiling = made;
  std::atomic_store(&desc->tiling, tiling);
  return tiling;
}

}  // namespace jaxmp::hostmp
