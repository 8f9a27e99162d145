// How our own kernels sum over k: every 256 consecutive k, counted from the first one of the whole product, have a
// sum of their own that starts at zero, and these are added in ascending order. So rounding errors grow with the depth
// of a panel and the number of panels, as a BLAS's do, and not with k as those of a single accumulator; and no bit
// depends on where k is cut, for a panel is packed from all of the parts that it lies in.
#ifndef JAXMP_HOSTMP_KERNELS_K_BLOCKS_H_
#define JAXMP_HOSTMP_KERNELS_K_BLOCKS_H_

#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// c = alpha op(a) op(b) + beta c, column-major; c is not read where beta is 0. Extents and leading dimensions must
// fit an int, which validation sees to.
struct Product {
  abi::cublasOperation_t trans_a, trans_b;
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  const void* b;
  int64_t ldb;
  void* c;
  int64_t ldc;
};

// A product whose k, at least one, lies in several parts, in ascending order. They share m, n, c and its leading
// dimension.
using Parts = std::vector<Product>;

// The depth of a panel, but on AMX (kAmxPanel).
constexpr int64_t kOrderedPanel = 256;

// `depth` k of a part from its `k` on, which are those of a panel from `offset` on.
struct Segment {
  const Product* part;
  int64_t k, offset, depth;
};

// `depth` k from `begin` on, counted from the first part's first.
struct KPanel {
  int64_t begin, depth;
  std::vector<Segment> segments;
};

// Worked example: depth 256, and k = 700 in two parts of 350. The first panel is [0, 256) of part 0, the second one
// [256, 350) of part 0 and [0, 162) of part 1, and the third one [162, 350) of part 1.
std::vector<KPanel> panels_of(const Parts& parts, int64_t depth);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_KERNELS_K_BLOCKS_H_
