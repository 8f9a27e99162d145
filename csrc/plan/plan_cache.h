// The process's plans, by problem. One of the places that hold state (docs/architecture.md lists them).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "csrc/base/lru_cache.h"
#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/plan/communicator.h"
#include "csrc/plan/matmul_problem.h"
#include "csrc/plan/plan.h"

namespace jaxmp {

class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : plans_(capacity) {}

  using MakeCommunicator = std::shared_ptr<const Communicator> (*)(const Problem& problem);

  // Returns the plan of the problem on this library, and makes it if the cache has none. `make` returns the
  // communicator; a library that is not hostmp passes its own.
  StatusOr<std::shared_ptr<Plan>> Get(const MpApi& api, const Problem& problem, MakeCommunicator make = OnHost);

  CacheInfo info() const { return plans_.info(); }
  void Clear() { plans_.Clear(); }
  void set_capacity(size_t capacity) { plans_.set_capacity(capacity); }
  // Receives one line for each plan made, on the thread that made it and without a lock; null for no log. The function
  // must live as long as the process.
  using Log = std::function<void(const std::string& line)>;
  void set_log(const Log* log) { log_ = log; }

 private:
  struct Key {
    const MpApi* api;  // a library's table is one object for the life of the process
    Problem problem;
    bool operator==(const Key& other) const { return api == other.api && problem == other.problem; }
  };
  struct Hash {
    size_t operator()(const Key& key) const { return ProblemHash()(key.problem); }
  };

  static std::shared_ptr<const Communicator> OnHost(const Problem& problem);
  StatusOr<std::shared_ptr<Plan>> Make(const Key& key, MakeCommunicator make) const;

  LruCache<Key, Plan, Hash> plans_;
  std::atomic<const Log*> log_{nullptr};
};

PlanCache& plan_cache();

}  // namespace jaxmp
