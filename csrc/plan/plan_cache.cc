#include "csrc/plan/plan_cache.h"

#include <chrono>

namespace jaxmp {

std::shared_ptr<const Communicator> PlanCache::OnHost(const Problem& problem) {
  return GetCommunicator({problem.mesh_shape, problem.axes_row, problem.axes_col});
}

StatusOr<std::shared_ptr<Plan>> PlanCache::Get(const MpApi& api, const Problem& problem, MakeCommunicator make) {
  return plans_.Get(Key{&api, problem}, [this, make](const Key& key) { return Make(key, make); });
}

StatusOr<std::shared_ptr<Plan>> PlanCache::Make(const Key& key, MakeCommunicator make) const {
  const auto start = std::chrono::steady_clock::now();
  const Problem& p = key.problem;
  StatusOr<std::shared_ptr<Plan>> plan = Plan::Make(*key.api, p, make(p));
  if (const Log* log = log_) {
    const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
    (*log)(std::to_string(took.count()) + " us, " + key.api->name + ", " + ToString(p) +
           (plan.ok() ? "" : ": " + plan.status().message()));
  }
  return plan;
}

PlanCache& plan_cache() {
  // Never destroyed, because executables that hold plans may outlive every static. The configuration sets the capacity.
  static auto* cache = new PlanCache(512);
  return *cache;
}

}  // namespace jaxmp
