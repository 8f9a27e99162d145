#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "csrc/base/float_state.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/exec/collective_call.h"

namespace jaxmp::hostmp {
namespace {

// Calls with less work do not wake a second thread.
constexpr double kWorthSharing = 2e6;  // floating-point operations, about 20 us

void FinishOne(CollectiveCall& collective) {
  if (collective.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const ScopedFloatState state(collective.state());
  collective.work->Finish();
  Complete(collective, Status());
}

// Asks the pool for a thread on each other processor. Waiting ranks help too, but they may all be on this processor.
void CallHelpers(const std::shared_ptr<CollectiveCall>& collective, int rank) {
  Pool* const pool = collective->arrivals[static_cast<size_t>(rank)].stream->pool;
  if (!pool || collective->work->operations() < kWorthSharing) return;
  const auto pieces = static_cast<int64_t>(collective->work->pieces());
  const int64_t threads = std::min<int64_t>({pieces, machine_threads(), int64_t{pool->num_threads()} + 1});
  if (threads < 2) return;
  pool->Schedule(threads - 1,
                 [collective] { Work(*collective, collective->workers.JoinAsHelper(current_processor())); });
}

Status Prepare(CollectiveCall& collective) {
  std::vector<const RankCall*> ranks;
  for (const Arrival& arrival : collective.arrivals) ranks.push_back(arrival.call.get());
  JAXMP_ASSIGN_OR_RETURN(collective.work, ranks[0]->Share(ranks));
  collective.left.store(collective.work->pieces() + 1, std::memory_order_relaxed);
  collective.is_prepared.store(true, std::memory_order_release);
  return {};
}

}  // namespace

void Work(CollectiveCall& collective, int area) {
  if (area < 0) return;
  const ScopedFloatState state(collective.state());
  const size_t pieces = collective.work->pieces();
  for (size_t i; (i = collective.next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
    collective.work->Run(i, area);
    FinishOne(collective);
  }
}

void Execute(const std::shared_ptr<CollectiveCall>& collective, int rank) {
  const int area = collective->workers.Join(current_processor());  // before all others, so there is one
  Status status;
  try {
    status = Prepare(*collective);
  } catch (const std::exception& exception) {  // out of memory
    status = ResourceExhausted(exception.what());
  }
  if (!status.ok()) return Complete(*collective, status);  // the ranks have arrived, so they must get the error
  try {
    CallHelpers(collective, rank);
  } catch (const std::exception&) {  // without help it only takes longer
  }
  Work(*collective, area);
  FinishOne(*collective);
}

}  // namespace jaxmp::hostmp
