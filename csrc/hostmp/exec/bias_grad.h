// The bias gradient of an epilog: the sum of the columns of a stored matrix, over all ranks.
//
// Columns are summed in blocks of 64 by global index, and the blocks in ascending order. The bits of a sum therefore do
// not depend on tiles, ranks or threads, and its error grows with 64 + n / 64 terms instead of n. Blocks are
// independent, so threads share them; one thread then adds the sums of the blocks in order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/hostmp/exec/tile_task.h"

namespace jaxmp::hostmp {

// Adjacent rows of the summed matrix (D, A or B), and where their sums go.
struct RowRange {
  int64_t begin;                      // global
  int64_t proc, local;                // process row and first local row, in the summed matrix
  int64_t result_proc, result_local;  // the same in the result
  int64_t rows;
};

// A piece is a row range and a group of blocks. Pieces of A and B may be summed at any time. A piece of D is summed
// after the last tile that writes a part of it, by that tile's thread, while the tile is still in its cache.
struct BiasGrad {
  std::vector<RowRange> row_ranges;  // in ascending order; empty for an epilog without a bias gradient
  std::vector<LocalRange> cols;      // the columns that each row range sums
  int64_t blocks = 0, groups = 0;
  std::unique_ptr<char[]> sums;  // of each row and block, in the accumulator's type
  bool needs_d = false;
  std::unique_ptr<std::atomic<int>[]> awaited;  // by piece of D: the number of tiles that it still waits for

  size_t pieces() const { return row_ranges.size() * static_cast<size_t>(groups); }
};

BiasGrad MakeBiasGrad(const DistributedProduct& product);

// Sums the blocks of one piece.
void SumPiece(const DistributedProduct& product, const BiasGrad& work, size_t piece);

// Sums the pieces of D that waited for this tile only. Called after each tile.
void SumReady(const DistributedProduct& product, const BiasGrad& work, const Tile& tile);

// Adds the sums of the blocks and writes them to every rank that needs them. Called after all pieces are summed.
void WriteBiasGrad(const DistributedProduct& product, const BiasGrad& work);

}  // namespace jaxmp::hostmp
