// Which devices of a mesh multiply together, and the communicator that they share.
#ifndef JAXMP_COMMUNICATORS_H_
#define JAXMP_COMMUNICATORS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/cublasmp_abi.h"
#include "csrc/hostmp/host.h"

namespace jaxmp {

// The mesh axes that span a group. Ranks of a 1-D group count row-major over `row`, in the order given. In a grid `row`
// gives the process row and `col` the process column, and ranks count down the columns: rank = prow + pcol * nprow.
struct Axes {
  std::vector<int64_t> mesh_shape, row, col;

  bool operator<(const Axes& other) const;
};

// Where one device of the mesh stands.
struct Place {
  int rank;       // in its group
  int64_t group;  // row-major over the axes that do not span the group
};

// The groups of one mesh, which all look alike: a rank means the same in each of them.
//
// Example: mesh_shape {2, 3}, row {1}, col {}. Positions 0 1 2 | 3 4 5 are two groups of three, position 4 is rank 1 of
// group 1. With row {1}, col {0} there is one 3×2 grid: position 4 = coordinates (1, 1) is process row 1, column 1,
// rank 1 + 1·3 = 4; position 3 = (1, 0) is rank 0 + 1·3 = 3.
class Communicator {
 public:
  explicit Communicator(const Axes& axes);

  int nprow() const { return nprow_; }
  int npcol() const { return npcol_; }
  int nranks() const { return nprow_ * npcol_; }

  // The place of the device at this row-major position in the mesh; null where the mesh has no such position.
  const Place* Locate(int64_t position) const;

  abi::ncclComm_t comm(int rank) const { return group_.comm(rank); }

 private:
  int nprow_, npcol_;
  std::vector<Place> places_;  // by position
  hostmp::Group group_;
};

// The communicator of these axes: the same one for as long as anybody holds it.
std::shared_ptr<const Communicator> GetCommunicator(const Axes& axes);

}  // namespace jaxmp

#endif  // JAXMP_COMMUNICATORS_H_
