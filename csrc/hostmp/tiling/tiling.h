// One schedule for every pattern. The descriptors say who holds which rows and columns of A, B and D; m, n and k are
// cut wherever any of them changes hands, and a tile of D is the sum, over the pieces of k in ascending order, of
// products of pieces that are read where they lie. All-gather, reduce-scatter, all-reduce and 2-D grids differ in
// nothing but the descriptors.
//
// Worked example, reduce-scatter on 2 ranks with n = 4, k = 6: D's columns change hands at 2, so n is cut into [0, 2)
// on rank 0 and [2, 4) on rank 1; A's columns and B's rows change hands at 3, so each tile is
// A0 · B0 (k in [0, 3)) + A1 · B1 (k in [3, 6)).
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/hostmp/handles/distribution.h"
#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

struct Tile {
  int32_t m_range, n_range;  // indices into Tiling::m and ::n
  int64_t row, rows;         // within the range
  int64_t col, cols;
  int32_t n_ranges = 1;  // where small ranges of n are taken together: how many, from the first column to the last
};

struct Tiling {
  std::vector<CommonRange> m;  // [0] D's rows, [1] those of op(A)
  std::vector<CommonRange> n;  // [0] D's columns, [1] those of op(B)
  std::vector<CommonRange> k;  // [0] columns of op(A), [1] rows of op(B)
  std::vector<Tile> tiles;

  // Whether the tile's columns of D, or of op(B), are next to each other in one rank's memory.
  bool IsTogetherInD(const Tile& tile) const { return IsTogether(tile, 0); }
  bool IsTogetherInB(const Tile& tile) const { return IsTogether(tile, 1); }

 private:
  bool IsTogether(const Tile& tile, int side) const;
};

Tiling MakeTiling(const MatmulCall& call);

// Tiles on and below the diagonal of a D that is symmetric, where m and n are cut alike. Empty for products that never
// are, and for those so small, or in such small pieces, that it does not pay.
Tiling MakeSymmetricTiling(const MatmulCall& call);

constexpr int64_t kRowUnit = 16, kColUnit = 8;  // of the kernels' register tiles
// Each tile packs its rows of op(A) and its columns of op(B), so their sum is made small. Columns are cut first: a slab
// of whole columns is one piece of memory, while rows of a large matrix put every column on a page of its own.
int64_t CountRowPieces(int64_t rows, int64_t cols, int64_t pieces);

// As many cuts and tiles as a schedule has at most, without making it: small blocks of large extents make any number.
double MostPieces(const MatmulCall& call);

inline double Operations(const MatmulCall& call) {
  return 2.0 * static_cast<double>(call.m) * static_cast<double>(call.n) * static_cast<double>(call.k);
}

}  // namespace jaxmp::hostmp
