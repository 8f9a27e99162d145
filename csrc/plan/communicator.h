// The groups of devices that multiply together, and what their plans share: communicator, grids, handle, device memory.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cublasmp/abi.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

// The mesh axes that span a group. Ranks of a 1-D group count row-major over `row`, in the given order. In a grid `row`
// gives the process row and `col` the process column, and ranks count down the columns: rank = prow + pcol * nprow.
struct Axes {
  std::vector<int64_t> mesh_shape, row, col;

  bool operator<(const Axes& other) const;
};

// The place of one device of the mesh.
struct GroupRank {
  int rank;       // in the device's group
  int64_t group;  // row-major over the axes that do not span the group
};

// A grid over the ranks of a group.
struct GridShape {
  int64_t nprow, npcol;
  abi::cublasMpGridLayout_t order;

  bool operator<(const GridShape& other) const {
    return std::tie(nprow, npcol, order) < std::tie(other.nprow, other.npcol, other.order);
  }
};

// The objects that the plans of one rank share.
class RankObjects {
 public:
  virtual ~RankObjects() = default;

  virtual StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, const GridShape& shape) = 0;
  // Returns a handle that one call at a time may use.
  virtual StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, abi::cudaStream_t stream) = 0;
  // Sends the handle's next call to the stream.
  virtual Status SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) = 0;
  // Agrees with every rank of the group on the workspace of this problem. `bytes`: what this rank takes, or its error;
  // an error on one rank is an error on all. Ranks agree once on a problem, even if its plan is dropped: another
  // process may have kept its plan, and would not come to agree again.
  virtual StatusOr<size_t> Agree(const Problem& problem, StatusOr<size_t> bytes) = 0;
  // Returns device memory for one call of the pattern on the stream. `last`: the memory of the caller's last call.
  virtual StatusOr<std::shared_ptr<void>> Workspace(const MpApi& api, const GridShape& shape, Pattern pattern,
                                                    size_t bytes, std::shared_ptr<void> last) = 0;
};

// The groups of one mesh. They all have one shape: a rank means the same in each of them.
class Communicator {
 public:
  explicit Communicator(const Axes& axes);
  virtual ~Communicator() = default;

  int nprow() const { return nprow_; }
  int npcol() const { return npcol_; }
  int nranks() const { return nprow_ * npcol_; }
  int64_t ngroups() const { return static_cast<int64_t>(group_ranks_.size()) / nranks(); }

  // Returns group and rank of the device at this row-major position in the mesh; null if the mesh has no such position.
  const GroupRank* Locate(int64_t position) const;

  // The same, or an error that names the position.
  StatusOr<GroupRank> Find(int64_t position) const;

  virtual int num_local_ranks() const = 0;
  int rank_of(int local_rank) const { return local_rank % nranks(); }

  // True if the objects of all local ranks are made at once, on any thread. If making them is collective, each local
  // rank's own thread makes them in its first call.
  virtual bool is_made_at_once() const = 0;

  virtual RankObjects& rank_objects(int local_rank) const = 0;

 private:
  int nprow_, npcol_;
  std::vector<GroupRank> group_ranks_;  // by position
};

// Returns hostmp's communicator of these axes: the same one as long as it is held anywhere.
std::shared_ptr<const Communicator> GetCommunicator(const Axes& axes);

}  // namespace jaxmp
