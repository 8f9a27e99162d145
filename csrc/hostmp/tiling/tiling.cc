#include "csrc/hostmp/tiling/tiling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/kernel_choice.h"

namespace jaxmp::hostmp {
namespace {

// Tiles for each thread of the machine: enough to leave work for others if a thread starts late or loses its processor
// for a while. Only one if two would be small, because each tile packs its operands again.
constexpr double kTilesPerThread = 2;
constexpr double kSmallTile = 1 << 18;       // elements of D
constexpr double kSmallestTile = 4e6;        // operations, about 40 us: the other costs of a tile are then noise
constexpr int64_t kLargestTile = 1 << 19;    // elements of D: the epilog finds the tile in the L2 or L3 cache
constexpr int64_t kLargestTile16 = 1 << 18;  // also bounds the workspace

// True if operands are widened or decoded one K block at a time. Each thread needs memory for it.
bool NeedsArea(const MatmulCall& call) { return Facts(call.a.desc.type).is_16bit || call.is_decoded(); }

int64_t LargestTile(const MatmulCall& call) { return NeedsArea(call) ? kLargestTile16 : kLargestTile; }

// Blocks of D that share a scale stay in one tile.
int64_t RowUnit(const MatmulCall& call) { return call.has_d_out_scale ? BlockOf(call.d_out_scale.mode) : kRowUnit; }

double SmallestArea(const MatmulCall& call) {
  return kSmallestTile / (2.0 * static_cast<double>(std::max<int64_t>(call.k, 1)));
}

double AreaOf(const MatmulCall& call) { return static_cast<double>(call.m) * static_cast<double>(call.n); }

// Returns the area of a tile if `whole` is to be computed. It depends only on the product and the machine, never on
// which threads are free, because the cut decides how a result is rounded.
double TargetArea(const MatmulCall& call, double whole) {
  const double one_each = whole / machine_threads();
  const double shared = std::max(one_each / kTilesPerThread, std::min(one_each, kSmallTile));
  return std::min(std::max(shared, SmallestArea(call)), static_cast<double>(LargestTile(call)));
}

// With more tiles per thread than this, one tile more or less does not matter.
constexpr int64_t kManyTiles = 8;

// Counts the pieces of one of `rectangles` of D: the same for each thread, unless pieces then become too small.
int64_t CountPieces(const MatmulCall& call, double rectangle, int64_t rectangles) {
  const int64_t pieces = std::max<int64_t>(1, std::llround(rectangle / TargetArea(call, AreaOf(call))));
  const int64_t threads = machine_threads(), tiles = pieces * rectangles;
  if (tiles <= threads || tiles > kManyTiles * threads) return pieces;
  const int64_t even = RoundUp(pieces, threads / std::gcd(threads, rectangles));
  return rectangle / static_cast<double>(even) >= SmallestArea(call) ? even : pieces;
}

// Each product reads all of op(A), so small pieces of n, a few from each rank, are multiplied together. The copies that
// this takes have a fraction of op(A)'s size. Numbers of 8 bits and fewer are decoded anyway, and so not copied.
//
// Each tile packs its rows of op(A) and copies its part of op(B) for these rows only, so joining many columns pays only
// if there are as many rows.
constexpr int64_t kFewTogether = 128, kMostTogether = 512;
constexpr int64_t kMostCopied = 4 << 20;  // bytes, for each thread

// Counts the ranges of n, from `first` on, that one tile takes.
size_t CountJoined(const MatmulCall& call, const Tiling& tiling, size_t first) {
  const std::vector<CommonRange>& ranges = tiling.n;
  const int64_t rows = tiling.m.empty() ? 0 : tiling.m.front().size;
  const int64_t together = std::clamp(rows, kFewTogether, kMostTogether);
  const int64_t column = std::max<int64_t>(1, call.k * Facts(call.a.desc.type).bytes);
  const int64_t most = call.is_decoded() ? together : std::min(together, kMostCopied / column);
  int64_t cols = ranges[first].size;
  size_t next = first + 1;
  while (next < ranges.size() && cols + ranges[next].size <= most) cols += ranges[next++].size;
  return next - first;
}

void CutRectangle(const Tile& all, int64_t pieces, int64_t unit, std::vector<Tile>* tiles) {
  const int64_t row_pieces = all.n_ranges > 1 ? pieces : CountRowPieces(all.rows, all.cols, pieces);
  const int64_t rows = RoundUp(CeilDiv(all.rows, row_pieces), unit);
  const int64_t cols = all.n_ranges > 1 ? all.cols : RoundUp(CeilDiv(all.cols, CeilDiv(pieces, row_pieces)), kColUnit);
  for (int64_t col = 0; col < all.cols; col += cols) {
    for (int64_t row = 0; row < all.rows; row += rows) {
      tiles->push_back({all.m_range, all.n_range, all.row + row, std::min(rows, all.rows - row), all.col + col,
                        std::min(cols, all.cols - col), all.n_ranges});
    }
  }
}

// Rows and columns of the largest tile on the diagonal, which is computed whole: 1/16 of the work at 2048. Smaller
// tiles are as slow, because each packs its operands again.
constexpr int64_t kDiagonal = 128;

void CutBelowDiagonal(const MatmulCall& call, const Tile& all, std::vector<Tile>* tiles) {
  const double pieces =
      static_cast<double>(all.rows) * static_cast<double>(all.cols) / TargetArea(call, AreaOf(call) / 2);
  CutRectangle(all, std::max<int64_t>(1, std::llround(pieces)), kRowUnit, tiles);
}

// Cuts the square of range `range` from `at` on into a rectangle below the diagonal and two halves on it, recursively.
void CutTriangle(const MatmulCall& call, int32_t range, int64_t at, int64_t size, std::vector<Tile>* tiles) {
  if (size <= kDiagonal) return tiles->push_back({range, range, at, size, at, size});
  const int64_t half = RoundUp(size / 2, kRowUnit);
  CutBelowDiagonal(call, {range, range, at + half, size - half, at, half}, tiles);
  CutTriangle(call, range, at, half, tiles);
  CutTriangle(call, range, at + half, size - half, tiles);
}

Tiling CutExtents(const MatmulCall& call) {
  const int64_t a_row = call.is_a_plain() ? call.a.row : call.a.col, a_col = call.a.row + call.a.col - a_row;
  const int64_t b_row = call.is_b_plain() ? call.b.row : call.b.col, b_col = call.b.row + call.b.col - b_row;
  Tiling tiling;
  // After an all-reduce every rank holds all of D. The descriptor describes the copies side by side; any copy will do.
  const auto of_d = [&](const Axis& axis, int64_t first, int64_t size) {
    return call.is_all_reduce ? std::vector<LocalRange>{{0, size, 0, 0}} : LocalRanges(axis, first, size);
  };
  tiling.m = CommonRanges(of_d(call.d.desc.rows, call.d.row, call.m), LocalRanges(call.a_m(), a_row, call.m));
  tiling.n = CommonRanges(of_d(call.d.desc.cols, call.d.col, call.n), LocalRanges(call.b_n(), b_col, call.n));
  tiling.k = CommonRanges(LocalRanges(call.a_k(), a_col, call.k), LocalRanges(call.b_k(), b_row, call.k));
  return tiling;
}

}  // namespace

int64_t CountRowPieces(int64_t rows, int64_t cols, int64_t pieces) {
  int64_t best = 1, least = INT64_MAX;
  for (int64_t row_pieces = 1; row_pieces <= pieces; ++row_pieces) {
    const int64_t packed = CeilDiv(rows, row_pieces) + CeilDiv(cols, CeilDiv(pieces, row_pieces));
    if (packed < least) best = row_pieces, least = packed;
  }
  return best;
}

Tiling MakeTiling(const MatmulCall& call) {
  Tiling tiling = CutExtents(call);
  int64_t rectangles = 0;
  for (size_t n = 0; n < tiling.n.size(); n += CountJoined(call, tiling, n)) {
    rectangles += static_cast<int64_t>(tiling.m.size());
  }
  for (size_t n = 0, together; n < tiling.n.size(); n += together) {
    together = CountJoined(call, tiling, n);
    const CommonRange& last = tiling.n[n + together - 1];
    const int64_t cols = last.begin + last.size - tiling.n[n].begin;
    for (size_t m = 0; m < tiling.m.size(); ++m) {
      const int64_t rows = tiling.m[m].size;
      const int64_t pieces = CountPieces(call, static_cast<double>(rows) * static_cast<double>(cols), rectangles);
      CutRectangle({static_cast<int32_t>(m), static_cast<int32_t>(n), 0, rows, 0, cols, static_cast<int32_t>(together)},
                   pieces, RowUnit(call), &tiling.tiles);
    }
  }
  return tiling;
}

Tiling MakeSymmetricTiling(const MatmulCall& call) {
  if (!call.may_be_symmetric() || call.m <= kDiagonal) return {};
  Tiling tiling = CutExtents(call);
  tiling.m = CutAt(tiling.m, tiling.n);
  tiling.n = CutAt(tiling.n, tiling.m);
  const auto ranges = static_cast<int32_t>(tiling.m.size());
  if (call.m < ranges * kDiagonal / 2) return {};
  const auto size_of = [&](int32_t range) { return tiling.m[static_cast<size_t>(range)].size; };
  for (int32_t n = 0; n < ranges; ++n) {
    for (int32_t m = n + 1; m < ranges; ++m) {
      CutBelowDiagonal(call, {m, n, 0, size_of(m), 0, size_of(n)}, &tiling.tiles);
    }
  }
  for (int32_t range = 0; range < ranges; ++range) CutTriangle(call, range, 0, size_of(range), &tiling.tiles);
  return tiling;
}

double MostPieces(const MatmulCall& call) {
  const auto runs_of = [](const Axis& axis, int64_t size) {
    return axis.nprocs == 1 ? 1.0 : 2.0 + static_cast<double>(size / axis.block);
  };
  const auto ranges = [&](const Axis& one, const Axis& other, int64_t size) {
    return runs_of(one, size) + runs_of(other, size);
  };
  const double m = ranges(call.d.desc.rows, call.a_m(), call.m), n = ranges(call.d.desc.cols, call.b_n(), call.n);
  const double k = ranges(call.a_k(), call.b_k(), call.k);
  const double elements = static_cast<double>(call.m) * static_cast<double>(call.n);
  return std::max(k, m * n + elements / static_cast<double>(LargestTile(call)));
}

bool Tiling::IsTogether(const Tile& tile, int side) const {
  for (int32_t i = tile.n_range; i + 1 < tile.n_range + tile.n_ranges; ++i) {
    const CommonRange &cut = n[static_cast<size_t>(i)], &next = n[static_cast<size_t>(i) + 1];
    if (next.proc[side] != cut.proc[side] || next.local[side] != cut.local[side] + cut.size) return false;
  }
  return true;
}

}  // namespace jaxmp::hostmp
