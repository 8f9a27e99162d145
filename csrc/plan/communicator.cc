#include "csrc/plan/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "csrc/cublasmp/status.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp {
namespace {

int64_t Extent(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& axes) {
  int64_t extent = 1;
  for (int64_t axis : axes) extent *= mesh_shape[static_cast<size_t>(axis)];
  return extent;
}

// Returns the row-major index of the coordinates on these axes only.
int64_t Flatten(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& coordinates,
                const std::vector<int64_t>& axes) {
  int64_t index = 0;
  for (int64_t axis : axes) {
    index = index * mesh_shape[static_cast<size_t>(axis)] + coordinates[static_cast<size_t>(axis)];
  }
  return index;
}

std::vector<int64_t> OtherAxes(const Axes& axes) {
  std::vector<int64_t> others;
  for (int64_t axis = 0; axis < static_cast<int64_t>(axes.mesh_shape.size()); ++axis) {
    const bool is_row = std::count(axes.row.begin(), axes.row.end(), axis) > 0;
    const bool is_col = std::count(axes.col.begin(), axes.col.end(), axis) > 0;
    if (!is_row && !is_col) others.push_back(axis);
  }
  return others;
}

std::vector<GroupRank> GroupRanksOf(const Axes& axes) {
  const std::vector<int64_t> others = OtherAxes(axes);
  const int64_t nprow = Extent(axes.mesh_shape, axes.row);
  std::vector<int64_t> coordinates(axes.mesh_shape.size(), 0);
  std::vector<GroupRank> group_ranks;
  for (bool is_done = false; !is_done;) {
    const int64_t prow = Flatten(axes.mesh_shape, coordinates, axes.row);
    const int64_t pcol = Flatten(axes.mesh_shape, coordinates, axes.col);
    group_ranks.push_back({static_cast<int>(prow + pcol * nprow), Flatten(axes.mesh_shape, coordinates, others)});
    is_done = true;  // unless some coordinate can still be counted up, the last axis first
    for (size_t axis = coordinates.size(); axis-- > 0 && is_done;) {
      is_done = ++coordinates[axis] == axes.mesh_shape[axis];
      if (is_done) coordinates[axis] = 0;
    }
  }
  return group_ranks;
}

constexpr size_t kWorkspaceAlignment = 64;  // a cache line, and an AVX-512 register

// hostmp's calls of one rank may overlap, and its ranks are the same in every group. So a local rank is a rank, a plan
// has grids of its own, and every call in flight has a handle and a workspace.
class HostRank final : public RankObjects {
 public:
  explicit HostRank(abi::ncclComm_t comm) : comm_(comm) {}

  StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, const GridShape& shape) override {
    abi::cublasMpGrid_t grid = nullptr;
    JAXMP_RETURN_IF_ERROR(
        Check(api, api.GridCreate(shape.nprow, shape.npcol, shape.order, comm_, &grid), "GridCreate"));
    return std::shared_ptr<abi::cublasMpGrid>(grid, api.GridDestroy);
  }

  StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, abi::cudaStream_t stream) override {
    abi::cublasMpHandle_t handle = nullptr;
    JAXMP_RETURN_IF_ERROR(Check(api, api.Create(&handle, stream), "Create"));
    return std::shared_ptr<abi::cublasMpHandle>(handle, api.Destroy);
  }

  Status SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) override {
    return Check(api, api.SetStream(handle, stream), "SetStream");
  }

  StatusOr<size_t> Agree(const Problem&, StatusOr<size_t> bytes) override { return bytes; }

  StatusOr<std::shared_ptr<void>> Workspace(const MpApi&, const GridShape&, Pattern, size_t bytes,
                                            std::shared_ptr<void> last) override {
    if (last || bytes == 0) return last;
    const size_t rounded = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    std::shared_ptr<void> made(std::aligned_alloc(kWorkspaceAlignment, rounded), std::free);
    if (!made) return ResourceExhausted("jaxmp: no memory for a workspace of ", bytes, " bytes");
    return made;
  }

 private:
  const abi::ncclComm_t comm_;
};

class HostCommunicator final : public Communicator {
 public:
  explicit HostCommunicator(const Axes& axes) : Communicator(axes), group_(nranks()) {
    for (int rank = 0; rank < nranks(); ++rank) ranks_.push_back(std::make_unique<HostRank>(group_.comm(rank)));
  }

  int num_local_ranks() const override { return nranks(); }
  bool is_made_at_once() const override { return true; }
  RankObjects& rank_objects(int local_rank) const override { return *ranks_[static_cast<size_t>(local_rank)]; }

 private:
  hostmp::Group group_;
  std::vector<std::unique_ptr<HostRank>> ranks_;
};

}  // namespace

bool Axes::operator<(const Axes& other) const {
  return std::tie(mesh_shape, row, col) < std::tie(other.mesh_shape, other.row, other.col);
}

Communicator::Communicator(const Axes& axes)
    : nprow_(static_cast<int>(Extent(axes.mesh_shape, axes.row))),
      npcol_(static_cast<int>(Extent(axes.mesh_shape, axes.col))),
      group_ranks_(GroupRanksOf(axes)) {}

const GroupRank* Communicator::Locate(int64_t position) const {
  if (position < 0 || position >= static_cast<int64_t>(group_ranks_.size())) return nullptr;
  return &group_ranks_[static_cast<size_t>(position)];
}

StatusOr<GroupRank> Communicator::Find(int64_t position) const {
  if (const GroupRank* group_rank = Locate(position)) return *group_rank;
  return InvalidArgument("jaxmp: the mesh has no position ", position);
}

std::shared_ptr<const Communicator> GetCommunicator(const Axes& axes) {
  // Never destroyed, because a plan of some other static may outlive this function's statics.
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<Axes, std::weak_ptr<const Communicator>>;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    if (auto found = known->find(axes); found != known->end()) {
      if (auto communicator = found->second.lock()) return communicator;
    }
  }
  auto made = std::make_shared<const HostCommunicator>(axes);
  std::lock_guard<std::mutex> lock(*mutex);
  std::weak_ptr<const Communicator>& entry = (*known)[axes];
  if (auto first = entry.lock()) return first;
  entry = made;
  return made;
}

}  // namespace jaxmp
