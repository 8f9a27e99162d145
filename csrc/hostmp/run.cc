#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "csrc/hostmp/job.h"
#include "csrc/hostmp/tile.h"
#include "csrc/hostmp/validate.h"

namespace jaxmp::hostmp {
namespace {

struct Job {
  std::vector<Arrival> arrivals;
  int self;
  Product2D product;
  std::atomic<size_t> next{0};
  // Tiles not yet done, and one for the arriving thread: while it still asks its stream's pool for help, nobody may
  // complete that stream.
  std::atomic<size_t> left{0};
  std::atomic<int> workers{0};
};

char* area_of_worker(const Job& job, int worker) {
  const int64_t bytes = job.product.area.bytes();
  if (bytes == 0) return nullptr;
  const auto nranks = static_cast<int>(job.arrivals.size());
  const uintptr_t workspace =
      reinterpret_cast<uintptr_t>(job.product.calls[static_cast<size_t>(worker % nranks)]->workspace);
  const uintptr_t aligned = (workspace + kAlignment - 1) / kAlignment * kAlignment;
  return reinterpret_cast<char*>(aligned) + worker / nranks * bytes;
}

void finish_one(Job& job, int self) {
  if (job.left.fetch_sub(1, std::memory_order_acq_rel) == 1) complete(job.arrivals, self, Status());
}

// Takes tiles until none is left. `self` is the rank that arrived on this thread, or -1 on a helper's.
void work(Job& job, int self) {
  const int worker = job.workers.fetch_add(1, std::memory_order_relaxed);
  if (worker >= machine_threads()) return;  // no area is left, and no processor either
  char* const area = area_of_worker(job, worker);
  const std::vector<Tile>& tiles = job.product.schedule.tiles;
  for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < tiles.size();) {
    run_tile(job.product, tiles[i], area);
    finish_one(job, self);
  }
}

void call_helpers(const std::shared_ptr<Job>& job) {
  Pool* const pool = job->arrivals[static_cast<size_t>(job->self)].stream->pool;
  if (!pool || operations(*job->product.calls[0]) < kWorthSharing) return;
  const auto tiles = static_cast<int64_t>(job->product.schedule.tiles.size());
  const int64_t threads = std::min<int64_t>({tiles, machine_threads(), int64_t{pool->num_threads()} + 1});
  for (int64_t i = 1; i < threads; ++i) pool->schedule([job] { work(*job, -1); });
}

std::shared_ptr<Job> make_job(std::vector<Arrival>& arrivals, int self) {
  auto job = std::make_shared<Job>();
  for (const Arrival& arrival : arrivals) job->product.calls.push_back(arrival.call.get());
  const Call& call = *job->product.calls[0];
  job->product.schedule = make_schedule(call);
  job->product.area = area_of(call, job->product.schedule);
  job->left.store(job->product.schedule.tiles.size() + 1, std::memory_order_relaxed);
  job->arrivals = std::move(arrivals);
  job->self = self;
  return job;
}

}  // namespace

void run_product(std::vector<Arrival> arrivals, int self) {
  std::shared_ptr<Job> job;
  try {
    job = make_job(arrivals, self);
  } catch (const std::exception& exception) {  // memory; the ranks have arrived, so they must hear of it
    return complete(arrivals, self, ResourceExhausted(exception.what()));
  }
  try {
    call_helpers(job);
  } catch (const std::exception&) {  // without help it only takes longer
  }
  work(*job, self);
  finish_one(*job, self);
}

}  // namespace jaxmp::hostmp
