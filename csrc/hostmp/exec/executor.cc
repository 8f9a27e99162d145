#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "csrc/base/float_state.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/exec/tile_task.h"
#include "csrc/hostmp/handles/buffers.h"
#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {
namespace {

char* area_of_worker(const Meeting& meeting, int worker) {
  const int64_t bytes = meeting.product.area().bytes();
  if (bytes == 0) return nullptr;
  const auto nranks = static_cast<int>(meeting.arrivals.size());
  const uintptr_t workspace =
      reinterpret_cast<uintptr_t>(meeting.product.calls[static_cast<size_t>(worker % nranks)]->workspace);
  const uintptr_t aligned = (workspace + kAlignment - 1) / kAlignment * kAlignment;
  return reinterpret_cast<char*>(aligned) + worker / nranks * bytes;
}

// What threads take one by one: the tiles, and pieces of a gradient that do not wait for them.
size_t count_pieces(const Meeting& meeting) {
  const GradientWork& gradient = meeting.gradient;
  return meeting.product.tiling().tiles.size() + (gradient.needs_d ? 0 : gradient.pieces());
}

void finish_one(Meeting& meeting) {
  if (meeting.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const ScopedFloatState state(meeting.state());
  write_gradient(meeting.product, meeting.gradient);
  complete(meeting, Status());
}

void call_helpers(const std::shared_ptr<Meeting>& meeting, int rank) {
  Pool* const pool = meeting->arrivals[static_cast<size_t>(rank)].stream->pool;
  if (!pool || operations(*meeting->product.calls[0]) < kWorthSharing) return;
  const auto tiles = static_cast<int64_t>(meeting->product.tiling().tiles.size());
  const int64_t threads = std::min<int64_t>({tiles, machine_threads(), int64_t{pool->num_threads()} + 1});
  const int64_t here = std::count(meeting->seats.begin(), meeting->seats.end(), Seat::kHere);
  for (int64_t i = here; i < threads; ++i) pool->schedule([meeting] { work(*meeting); });
}

void open(Meeting& meeting) {
  for (const Arrival& arrival : meeting.arrivals) meeting.product.calls.push_back(arrival.call.get());
  meeting.gradient = make_gradient(meeting.product);
  meeting.left.store(count_pieces(meeting) + 1, std::memory_order_relaxed);
  meeting.is_open.store(true, std::memory_order_release);
}

}  // namespace

void work(Meeting& meeting) {
  const int worker = meeting.workers.fetch_add(1, std::memory_order_relaxed);
  if (worker >= machine_threads()) return;  // no area is left, and no processor either
  const ScopedFloatState state(meeting.state());
  char* const area = area_of_worker(meeting, worker);
  const std::vector<Tile>& tiles = meeting.product.tiling().tiles;
  const size_t pieces = count_pieces(meeting);
  for (size_t i; (i = meeting.next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
    if (i < tiles.size()) {
      run_tile(meeting.product, tiles[i], area);
      sum_ready(meeting.product, meeting.gradient, tiles[i]);
    } else {
      sum_piece(meeting.product, meeting.gradient, i - tiles.size());
    }
    finish_one(meeting);
  }
}

void run_product(const std::shared_ptr<Meeting>& meeting, int rank) {
  try {
    open(*meeting);
  } catch (const std::exception& exception) {  // memory; the ranks have arrived, so they must hear of it
    return complete(*meeting, ResourceExhausted(exception.what()));
  }
  try {
    call_helpers(meeting, rank);
  } catch (const std::exception&) {  // without help it only takes longer
  }
  work(*meeting);
  finish_one(*meeting);
}

}  // namespace jaxmp::hostmp
