// One schedule for every pattern. The descriptors say which rank holds which rows and columns of A, B and D. m, n and k
// are cut wherever one of them passes to another rank. A tile of D is the sum, over the pieces of k in ascending order,
// of products of pieces that are read in place. All-gather, reduce-scatter, all-reduce and 2-D grids differ only in the
// descriptors.
//
// Worked example, reduce-scatter on 2 ranks with n = 4, k = 6: D's columns pass to another rank at 2, so n is cut into
// [0, 2) on rank 0 and [2, 4) on rank 1; A's columns and B's rows pass at 3, so each tile is A0 · B0 (k in [0, 3)) + A1
// · B1 (k in [3, 6)).
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
  int32_t n_ranges = 1;  // how many ranges of n the tile covers, whole; more than 1 if they are small
};

struct Tiling {
  std::vector<CommonRange> m;  // [0] D's rows, [1] op(A)'s rows
  std::vector<CommonRange> n;  // [0] D's columns, [1] op(B)'s columns
  std::vector<CommonRange> k;  // [0] op(A)'s columns, [1] op(B)'s rows
  std::vector<Tile> tiles;

  // True if the tile's columns of D, or of op(B), are adjacent in one rank's memory.
  bool IsTogetherInD(const Tile& tile) const { return IsTogether(tile, 0); }
  bool IsTogetherInB(const Tile& tile) const { return IsTogether(tile, 1); }

 private:
  bool IsTogether(const Tile& tile, int side) const;
};

Tiling MakeTiling(const MatmulCall& call);

// Tiles on and below the diagonal of a symmetric D, with m and n cut at the same places. Empty for products that are
// never symmetric, and for products so small, or in such small pieces, that it does not pay.
Tiling MakeSymmetricTiling(const MatmulCall& call);

constexpr int64_t kRowUnit = 16, kColUnit = 8;  // of the kernels' register tiles
// Chooses how many row pieces to cut, so that rows of op(A) plus columns of op(B), which each tile packs, are few.
// Columns are cut first: whole columns are one piece of memory, but rows put every column on a page of its own.
int64_t CountRowPieces(int64_t rows, int64_t cols, int64_t pieces);

// A bound on a schedule's cuts and tiles, found without making it: small blocks of large extents make any number.
double MostPieces(const MatmulCall& call);

inline double Operations(const MatmulCall& call) {
  return 2.0 * static_cast<double>(call.m) * static_cast<double>(call.n) * static_cast<double>(call.k);
}

}  // namespace jaxmp::hostmp
