// Who multiplies a call's tiles: one thread on each processor, so that no processor idles while two threads share one.
#include <set>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/exec/workers.h"
#include "tests/cpp/check.h"

namespace jaxmp::hostmp {
namespace {

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
