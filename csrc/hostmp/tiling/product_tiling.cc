#include "csrc/hostmp/tiling/product_tiling.h"

#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

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

std::shared_ptr<const ProductTiling> MakeProductTiling(const TilingKey& key, const MatmulCall& call) {
  const auto made = std::make_shared<ProductTiling>();
  made->key = key;
  made->tiling = MakeTiling(call);
  made->area = AreaOf(call, made->tiling);
  made->workspace_bytes = WorkspaceBytes(call, made->area);
  return made;
}

// Those that some descriptor still has, for the other ranks of a plan and for its other execution contexts.
struct Shared {
  std::mutex mutex;
  std::map<TilingKey, std::weak_ptr<const ProductTiling>> tilings;
};

std::shared_ptr<const ProductTiling> FindOrMake(const TilingKey& key, const MatmulCall& call) {
  static auto* const shared = new Shared;  // a product may still run when statics are destroyed
  {
    std::lock_guard<std::mutex> lock(shared->mutex);
    const auto found = shared->tilings.find(key);
    if (auto tiling = found == shared->tilings.end() ? nullptr : found->second.lock()) return tiling;
  }
  auto made = MakeProductTiling(key, call);
  std::lock_guard<std::mutex> lock(shared->mutex);
  for (auto at = shared->tilings.begin(); at != shared->tilings.end();) {
    at = at->second.expired() ? shared->tilings.erase(at) : std::next(at);
  }
  std::weak_ptr<const ProductTiling>& entry = shared->tilings[key];
  if (auto first = entry.lock()) return first;
  entry = made;
  return made;
}

}  // namespace

std::shared_ptr<const ProductTiling> TilingOf(const MatmulCall& call, abi::cublasMpMatmulDescriptor* desc) {
  const TilingKey key = KeyOf(call);
  auto tiling = std::atomic_load(&desc->tiling);
  if (tiling && tiling->key == key) return tiling;
  tiling = FindOrMake(key, call);
  std::atomic_store(&desc->tiling, tiling);
  return tiling;
}

}  // namespace jaxmp::hostmp
