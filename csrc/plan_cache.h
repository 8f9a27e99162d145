// The process's plans, by problem. One of the three places that hold state; the others are the communicators and the
// configuration.
#ifndef JAXMP_PLAN_CACHE_H_
#define JAXMP_PLAN_CACHE_H_

#include <atomic>
#include <memory>

#include "csrc/lru_cache.h"
#include "csrc/mp_api.h"
#include "csrc/plan.h"
#include "csrc/problem.h"
#include "csrc/status.h"

namespace jaxmp {

class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : plans_(capacity) {}

  // The plan of the problem on this library, made where the cache has none.
  StatusOr<std::shared_ptr<Plan>> Get(const MpApi& api, const Problem& problem);

  CacheInfo info() const { return plans_.info(); }
  void Clear() { plans_.Clear(); }
  void set_capacity(size_t capacity) { plans_.set_capacity(capacity); }
  void set_log(bool is_on) { is_logging_ = is_on; }  // one line on stderr for each plan made

 private:
  struct Key {
    const MpApi* api;  // a library's table is one object for the life of the process
    Problem problem;
    bool operator==(const Key& other) const { return api == other.api && problem == other.problem; }
  };
  struct Hash {
    size_t operator()(const Key& key) const { return ProblemHash()(key.problem); }
  };

  StatusOr<std::shared_ptr<Plan>> Make(const Key& key) const;

  LruCache<Key, Plan, Hash> plans_;
  std::atomic<bool> is_logging_{false};
};

PlanCache& plan_cache();

}  // namespace jaxmp

#endif  // JAXMP_PLAN_CACHE_H_
