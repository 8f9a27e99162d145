// The threads that help with a product: each on a processor of its own, all of them at once.
#include <sched.h>

#include <condition_variable>
#include <set>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/exec/workers.h"
#include "csrc/hostmp/handles/bound_threads.h"
#include "tests/cpp/check.h"

namespace jaxmp::hostmp {
namespace {

// Where work runs, and when all of it has come.
struct Arrivals {
  std::mutex mutex;
  std::condition_variable changed;
  std::multiset<int> processors;
};

// Asks for `count` threads, which stay until all of them are there, and returns their processors.
std::multiset<int> processors_of(int64_t count) {
  const auto arrivals = std::make_shared<Arrivals>();
  const auto is_full = [count, at = arrivals.get()] { return static_cast<int64_t>(at->processors.size()) == count; };
  BoundThreads threads(machine_threads());
  threads.Schedule(count, [arrivals, is_full] {
    std::unique_lock<std::mutex> lock(arrivals->mutex);
    arrivals->processors.insert(sched_getcpu());
    arrivals->changed.notify_all();
    arrivals->changed.wait(lock, is_full);
  });
  std::unique_lock<std::mutex> lock(arrivals->mutex);
  arrivals->changed.wait(lock, is_full);
  return arrivals->processors;
}

void stay_on(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(processor), &set);
  CHECK_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
}

TEST(test_helpers_are_on_every_other_processor) {
  processors();  // before this thread is bound to one of them
  for (const int here : processors()) {
    stay_on(here);
    const std::multiset<int> found = processors_of(machine_threads() - 1);
    std::multiset<int> expected(processors().begin(), processors().end());
    expected.erase(here);
    CHECK(found == expected);
  }
}

// The asking thread's own processor comes last.
TEST(test_as_many_as_processors) {
  CHECK(processors_of(machine_threads()) == std::multiset<int>(processors().begin(), processors().end()));
}

// The threads that multiply a call's tiles: one on each processor, so that none idles while two threads share another.
TEST(test_one_thread_on_each_processor) {
  Workers workers;
  for (int processor = 0; processor < machine_threads(); ++processor) {
    CHECK_EQ(workers.Join(processor), processor);
    CHECK_EQ(workers.Join(processor), -1);
  }
}

// On a system that does not bind threads, all of them may seem to be on one processor.
TEST(test_helpers_take_what_is_left) {
  Workers workers;
  std::set<int> areas = {workers.Join(0)};
  for (int helper = 1; helper < machine_threads(); ++helper) areas.insert(workers.JoinAsHelper(0));
  CHECK_EQ(static_cast<int>(areas.size()), machine_threads());
  CHECK(areas.count(-1) == 0);
  CHECK_EQ(workers.JoinAsHelper(0), -1);
}

TEST(test_a_thread_on_no_known_processor_takes_any_area) {
  Workers workers;
  for (int area = 0; area < machine_threads(); ++area) CHECK_EQ(workers.Join(-1), area);
  CHECK_EQ(workers.Join(-1), -1);
}

}  // namespace
}  // namespace jaxmp::hostmp
