// The bias gradient of an epilog: the columns of a stored matrix, summed over all ranks.
#ifndef JAXMP_HOSTMP_GRADIENT_H_
#define JAXMP_HOSTMP_GRADIENT_H_

#include <vector>

#include "csrc/hostmp/tile.h"

namespace jaxmp::hostmp {

// Rows of D, A or B, the sums of which are a piece of work: on which process row, and from which local row on.
struct Strip {
  int64_t proc, local;                // of the matrix that is summed
  int64_t result_proc, result_local;  // of what receives the sums
  int64_t rows;
};

struct GradientWork {
  std::vector<Strip> strips;  // none for an epilog without a bias gradient
  std::vector<Run> cols;      // what each strip sums
  bool needs_d = false;       // sums what the tiles write; else strips may be summed along with the tiles
};

GradientWork make_gradient(const Call& call);

// Sums the strip's columns, and writes the sums to every rank that wants them.
void sum_strip(const Product2D& product, const GradientWork& work, const Strip& strip);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GRADIENT_H_
