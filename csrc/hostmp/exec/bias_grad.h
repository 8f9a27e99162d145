// The bias gradient of an epilog: the columns of a stored matrix, summed over all ranks.
//
// Columns are summed in blocks of 64 of their global index, and blocks one after the other: the bits of a sum depend on
// neither tiles nor ranks nor threads, and its error grows with 64 + n / 64 terms instead of n. The blocks do not
// depend on each other, so threads share them; only their sums are added in order, by one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/hostmp/exec/tile_task.h"

namespace jaxmp::hostmp {

// Rows of D, A or B that lie next to each other: on which process row, and from which local row on.
struct RowRange {
  int64_t begin;                      // global
  int64_t proc, local;                // of the matrix that is summed
  int64_t result_proc, result_local;  // of what receives the sums
  int64_t rows;
};

// A piece is a row range and a group of blocks. Pieces of A and B may be summed at any time; one of D as soon as the
// last tile that writes a part of it is done, which the thread of that tile does while it has the tile in its cache.
struct BiasGrad {
  std::vector<RowRange> row_ranges;  // in ascending order; none for an epilog without a bias gradient
  std::vector<LocalRange> cols;      // what each row range sums
  int64_t blocks = 0, groups = 0;
  std::unique_ptr<char[]> sums;  // of every block, in the accumulator's type
  bool needs_d = false;
  std::unique_ptr<std::atomic<int>[]> awaited;  // by piece of D: how many tiles it still waits for

  size_t pieces() const { return row_ranges.size() * static_cast<size_t>(groups); }
};

BiasGrad MakeBiasGrad(const DistributedProduct& product);

// Sums the blocks of one piece.
void SumPiece(const DistributedProduct& product, const BiasGrad& work, size_t piece);

// To be called after each tile: sums the pieces of D that waited for this tile alone.
void SumReady(const DistributedProduct& product, const BiasGrad& work, const Tile& tile);

// Once all pieces are summed: adds the blocks, and writes the sums to every rank that wants them.
void WriteBiasGrad(const DistributedProduct& product, const BiasGrad& work);

}  // namespace jaxmp::hostmp
