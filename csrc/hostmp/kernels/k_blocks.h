// How our own kernels sum over k. Each K block of KC consecutive k, counted from the first k of the whole product, has
// a separate sum that starts at zero, and these sums are added in ascending order. Rounding errors grow with KC and the
// number of K blocks, as a BLAS's do, and not with k as in a single accumulator. No bit depends on where k is cut into
// segments, because a K block is packed from all segments that it overlaps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// c = alpha op(a) op(b) + beta c, column-major; c is not read if beta is 0. Validation checks that extents and leading
// dimensions fit an int.
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

// A product with its k, at least one, in several K segments, in ascending order. They share m, n, c and its leading
// dimension.
using KSegments = std::vector<Product>;

constexpr int64_t kKC = 256;  // k of a K block, except with AMX (kAmxKC)

// The overlap of a K block and a segment: `depth` k, from `k` on in the segment and from `offset` on in the block.
template <typename Segment>
struct KSlice {
  const Segment* segment;
  int64_t k, offset, depth;
};

// A K block, as a range of its slices.
template <typename Segment>
struct KBlock {
  int64_t first, depth;    // k, counted from the first of the whole product
  const Segment* segment;  // the segment of the block's first k,
  int64_t k;               // and the index of this k in it

  struct Iterator {
    KSlice<Segment> slice;
    int64_t left;  // k of the block from this slice on

    const KSlice<Segment>& operator*() const { return slice; }
    bool operator!=(const Iterator& other) const { return left != other.left; }
    Iterator& operator++() {
      left -= slice.depth;
      const Segment* const next = slice.segment + 1;
      if (left > 0) slice = {next, 0, slice.offset + slice.depth, std::min(left, next->k)};
      return *this;
    }
  };
  Iterator begin() const { return {{segment, k, 0, std::min(depth, segment->k - k)}, depth}; }
  Iterator end() const { return {{}, 0}; }
};

// The K blocks of a product: KC k in a block, and the rest in the last. Worked example: KC = 256, and k = 700 in two
// segments of 350. The first block is [0, 256) of segment 0, the second one [256, 350) of segment 0 and [0, 162) of
// segment 1, and the third one [162, 350) of segment 1.
template <typename Segment>
class KBlocks {
 public:
  KBlocks(const Segment* segments, size_t count, int64_t kc) : segments_(segments), kc_(kc) {
    for (size_t i = 0; i < count; ++i) k_ += segments[i].k;
  }

  int64_t k() const { return k_; }

  struct Iterator {
    KBlock<Segment> block;
    int64_t kc, left;  // k from this block on

    const KBlock<Segment>& operator*() const { return block; }
    bool operator!=(const Iterator& other) const { return left != other.left; }
    Iterator& operator++() {
      left -= block.depth;
      block.first += block.depth;
      block.k += block.depth;
      while (left > 0 && block.k >= block.segment->k) block.k -= block.segment++->k;
      block.depth = std::min(kc, left);
      return *this;
    }
  };
  Iterator begin() const { return {{0, std::min(kc_, k_), segments_, 0}, kc_, k_}; }
  Iterator end() const { return {{}, kc_, 0}; }

 private:
  const Segment* segments_;
  int64_t kc_, k_ = 0;
};

}  // namespace jaxmp::hostmp
