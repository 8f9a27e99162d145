// Which devices of a mesh multiply together, and what their plans share: communicator, grids, handle, device memory.
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

// The mesh axes that span a group. Ranks of a 1-D group count row-major over `row`, in the order given. In a grid `row`
// gives the process row and `col` the process column, and ranks count down the columns: rank = prow + pcol * nprow.
struct Axes {
  std::vector<int64_t> mesh_shape, row, col;

  bool operator<(const Axes& other) const;
};

// Where one device of the mesh stands.
struct GroupRank {
  int rank;       // in its group
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

// What the plans of one rank share.
class RankObjects {
 public:
  virtual ~RankObjects() = default;

  virtual StatusOr<std::shared_ptr<abi::cublasMpGrid>> Grid(const MpApi& api, const GridShape& shape) = 0;
  // A handle that one call at a time may use.
  virtual StatusOr<std::shared_ptr<abi::cublasMpHandle>> Handle(const MpApi& api, abi::cudaStream_t stream) = 0;
  // Has the handle's next call go to the stream.
  virtual Status SetStream(const MpApi& api, abi::cublasMpHandle* handle, abi::cudaStream_t stream) = 0;
  // What every rank of the group takes for the workspace of this problem, where this rank takes `bytes`, or failed: an
  // error on one of them is an error on all. Ranks agree once on a problem, whatever becomes of its plan: another
  // process may have kept its own plan, and would not come to agree again.
  virtual StatusOr<size_t> Agree(const Problem& problem, StatusOr<size_t> bytes) = 0;
  // Device memory for one call of the pattern on the stream, in place of what the caller's last call had.
  virtual StatusOr<std::shared_ptr<void>> Workspace(const MpApi& api, const GridShape& shape, Pattern pattern,
                                                    size_t bytes, std::shared_ptr<void> last) = 0;
};

// The groups of one mesh, which all look alike: a rank means the same in each of them.
//
// Example: mesh_shape {2, 3}, row {1}, col {}. Positions 0 1 2 | 3 4 5 are two groups of three, position 4 is rank 1 of
// group 1. With row {1}, col {0} there is one 3×2 grid: position 4 = coordinates (1, 1) is process row 1, column 1,
// rank 1 + 1·3 = 4; position 3 = (1, 0) is rank 0 + 1·3 = 3.
//
// It is also where libraries differ: in who makes the objects of a rank, and in what ranks keep between plans. A rank
// of one group that this process may serve is a *local rank*; objects belong to local ranks.
class Communicator {
 public:
  explicit Communicator(const Axes& axes);
  virtual ~Communicator() = default;

  int nprow() const { return nprow_; }
  int npcol() const { return npcol_; }
  int nranks() const { return nprow_ * npcol_; }
  int64_t ngroups() const { return static_cast<int64_t>(group_ranks_.size()) / nranks(); }

  // Group and rank of the device at this row-major position in the mesh; null where the mesh has no such position.
  const GroupRank* Locate(int64_t position) const;

  // The same, or an error that names the position.
  StatusOr<GroupRank> Find(int64_t position) const;

  virtual int num_local_ranks() const = 0;
  int rank_of(int local_rank) const { return local_rank % nranks(); }

  // Whether the objects of all local ranks are made at once, on any thread. Where making them is collective, each local
  // rank's own thread makes them in the first call that comes to it.
  virtual bool is_made_at_once() const = 0;

  virtual RankObjects& rank_objects(int local_rank) const = 0;

 private:
  int nprow_, npcol_;
  std::vector<GroupRank> group_ranks_;  // by position
};

// hostmp's communicator of these axes: the same one for as long as anybody holds it.
std::shared_ptr<const Communicator> GetCommunicator(const Axes& axes);

}  // namespace jaxmp
