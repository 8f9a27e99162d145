// Where a device of a mesh stands: a wrong rank here would be a silently wrong product.
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/plan/communicator.h"
#include "tests/cpp/check.h"

namespace jaxmp {
namespace {

void CheckPlaces(const Axes& axes, const std::vector<std::pair<int, int64_t>>& rank_and_group) {
  const auto made = GetCommunicator(axes);
  const Communicator& communicator = *made;
  for (size_t position = 0; position < rank_and_group.size(); ++position) {
    const GroupRank* place = communicator.Locate(static_cast<int64_t>(position));
    CHECK(place != nullptr);
    CHECK_EQ(place->rank, rank_and_group[position].first);
    CHECK_EQ(place->group, rank_and_group[position].second);
  }
  CHECK(communicator.Locate(-1) == nullptr);
  CHECK(communicator.Locate(static_cast<int64_t>(rank_and_group.size())) == nullptr);
}

TEST(RanksCountOverTheGroupsAxes) {
  CheckPlaces({{}, {}, {}}, {{0, 0}});
  CheckPlaces({{4}, {0}, {}}, {{0, 0}, {1, 0}, {2, 0}, {3, 0}});
  CheckPlaces({{2, 3}, {1}, {}}, {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {2, 1}});
  CheckPlaces({{2, 3}, {0}, {}}, {{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}});
  CheckPlaces({{2, 3}, {}, {}}, {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}});  // local: everybody alone
}

TEST(TwoAxesCountInTheOrderGiven) {
  CheckPlaces({{2, 2}, {0, 1}, {}}, {{0, 0}, {1, 0}, {2, 0}, {3, 0}});
  CheckPlaces({{2, 2}, {1, 0}, {}}, {{0, 0}, {2, 0}, {1, 0}, {3, 0}});
}

TEST(GridsCountDownTheColumns) {
  CheckPlaces({{2, 3}, {0}, {1}}, {{0, 0}, {2, 0}, {4, 0}, {1, 0}, {3, 0}, {5, 0}});
  CheckPlaces({{2, 3}, {1}, {0}}, {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}});
  const auto made = GetCommunicator({{2, 2, 3}, {2}, {0}});
  const Communicator& communicator = *made;
  CHECK_EQ(communicator.nprow(), 3);
  CHECK_EQ(communicator.npcol(), 2);
  CHECK_EQ(communicator.Locate(1 * 6 + 1 * 3 + 2)->rank, 2 + 1 * 3);
  CHECK_EQ(communicator.Locate(1 * 6 + 1 * 3 + 2)->group, 1);
}

TEST(OneCommunicatorForAsLongAsItIsHeld) {
  const Axes axes = {{4, 2}, {0}, {}};
  const auto first = GetCommunicator(axes);
  CHECK(GetCommunicator(axes) == first);
  CHECK(GetCommunicator({{4, 2}, {1}, {}}) != first);
  std::vector<std::shared_ptr<const Communicator>> made(4);
  std::vector<std::thread> threads;
  for (auto& communicator : made) threads.emplace_back([&] { communicator = GetCommunicator({{7}, {0}, {}}); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& communicator : made) CHECK(communicator == made[0]);
}

}  // namespace
}  // namespace jaxmp
