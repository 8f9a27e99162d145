#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "csrc/base/float_state.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/exec/tile_task.h"
#include "csrc/hostmp/handles/handles.h"

namespace jaxmp::hostmp {
namespace {

char* AreaAt(const CollectiveCall& collective, int index) {
  const int64_t bytes = collective.product.area().bytes();
  if (bytes == 0) return nullptr;
  const auto nranks = static_cast<int>(collective.arrivals.size());
  const uintptr_t workspace =
      reinterpret_cast<uintptr_t>(collective.product.calls[static_cast<size_t>(index % nranks)]->workspace);
  const uintptr_t aligned = (workspace + kAlignment - 1) / kAlignment * kAlignment;
  return reinterpret_cast<char*>(aligned) + index / nranks * bytes;
}

// What threads take one by one: the tiles, and pieces of a gradient that do not wait for them.
size_t CountPieces(const CollectiveCall& collective) {
  const BiasGrad& gradient = collective.gradient;
  return collective.product.tiling().tiles.size() + (gradient.needs_d ? 0 : gradient.pieces());
}

void FinishOne(CollectiveCall& collective) {
  if (collective.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const ScopedFloatState state(collective.state());
  WriteBiasGrad(collective.product, collective.gradient);
  Complete(collective, Status());
}

// Asks the pool for a thread on each other processor. Ranks that wait help too, but they may all be on this one.
void CallHelpers(const std::shared_ptr<CollectiveCall>& collective, int rank) {
  Pool* const pool = collective->arrivals[static_cast<size_t>(rank)].stream->pool;
  if (!pool || Operations(*collective->product.calls[0]) < kWorthSharing) return;
  const auto tiles = static_cast<int64_t>(collective->product.tiling().tiles.size());
  const int64_t threads = std::min<int64_t>({tiles, machine_threads(), int64_t{pool->num_threads()} + 1});
  if (threads < 2) return;
  pool->Schedule(threads - 1,
                 [collective] { Work(*collective, collective->workers.JoinAsHelper(current_processor())); });
}

void Prepare(CollectiveCall& collective) {
  for (const Arrival& arrival : collective.arrivals) collective.product.calls.push_back(arrival.call.get());
  collective.product.is_one_matrix = IsOneMatrix(collective.product.calls);
  collective.gradient = MakeBiasGrad(collective.product);
  collective.left.store(CountPieces(collective) + 1, std::memory_order_relaxed);
  collective.is_prepared.store(true, std::memory_order_release);
}

}  // namespace

void Work(CollectiveCall& collective, int area_index) {
  if (area_index < 0) return;
  const ScopedFloatState state(collective.state());
  char* const area = AreaAt(collective, area_index);
  const std::vector<Tile>& tiles = collective.product.tiling().tiles;
  const size_t pieces = CountPieces(collective);
  for (size_t i; (i = collective.next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
    if (i < tiles.size()) {
      RunTile(collective.product, tiles[i], area);
      SumReady(collective.product, collective.gradient, tiles[i]);
    } else {
      SumPiece(collective.product, collective.gradient, i - tiles.size());
    }
    FinishOne(collective);
  }
}

void Execute(const std::shared_ptr<CollectiveCall>& collective, int rank) {
  const int area = collective->workers.Join(current_processor());  // ahead of all others, so there is one
  try {
    Prepare(*collective);
  } catch (const std::exception& exception) {  // memory; the ranks have arrived, so they must hear of it
    return Complete(*collective, ResourceExhausted(exception.what()));
  }
  try {
    CallHelpers(collective, rank);
  } catch (const std::exception&) {  // without help it only takes longer
  }
  Work(*collective, area);
  FinishOne(*collective);
}

}  // namespace jaxmp::hostmp
