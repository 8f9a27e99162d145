#include "csrc/hostmp/handles/bound_threads.h"

#include <sched.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "csrc/base/completion_pool.h"
#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {
namespace {

void BindTo(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(processor), &set);
  sched_setaffinity(0, sizeof(set), &set);  // if the system refuses, the thread helps on any processor
}

// By processor, in the order of processors(). Never destroyed, because the threads outlive main.
const std::vector<std::unique_ptr<CompletionPool>>& bound_threads() {
  static const auto* const all = [] {
    auto* const made = new std::vector<std::unique_ptr<CompletionPool>>;
    for (const int processor : processors()) {
      made->push_back(std::make_unique<CompletionPool>(1, [processor] { BindTo(processor); }));
    }
    return made;
  }();
  return *all;
}

}  // namespace

void BoundThreads::Schedule(int64_t threads, const std::function<void()>& work) {
  const auto& all = bound_threads();
  const int64_t here = current_processor();  // -1 if it is none of them: the first one is then asked first
  for (int64_t i = 1; i <= threads; ++i) all[static_cast<size_t>(here + i) % all.size()]->Post(work);
}

}  // namespace jaxmp::hostmp
