// The loop over blocks of all our GEMMs, in the order of the BLAS libraries: K blocks (k_blocks.h), then NC columns of
// op(B), which are packed, then MC rows of op(A), which are packed, then MR x NR tiles of C.
//
// A Kernel has
//   kKC, kMC, kNC    k, rows and columns that are packed at a time; kUncut for all of them
//   kMR, kNR         rows and columns of C that one call of Multiply() computes
//   kReusesB         whether one micro-panel of op(B) meets all of op(A) before the next one, or the other way round:
//                    the reused panel stays in the L1 cache, the others come from the L2 cache
//   ABytes(rows, depth), BBytes(cols, depth)
//                    packed sizes; for a multiple of kMR rows (kNR columns) also the offset of the next ones
//   OwnBytes(m, n, depth)
//                    what Multiply() needs in addition to the packed operands
//   PackA(block, top, rows, to), PackB(block, left, cols, to)
//                    pack all slices of a K block
//   Multiply(block, packed, tile)
//                    adds the product of a K block to a tile of C; the first block may overwrite the tile
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

constexpr int64_t kUncut = INT64_MAX;

struct CTile {
  int64_t row, rows, col, cols;  // within C
};

struct Packed {
  const char *a, *b;  // the tile's rows and columns
  char* own;
};

struct GemmScratch {
  int64_t a, b, own;  // bytes
  int64_t bytes() const { return a + b + own; }
};

// Scratch for any product of at most m x n and k.
template <typename Kernel>
GemmScratch ScratchOf(const Kernel& kernel, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLine = 64;  // bytes of a cache line
  const int64_t depth = std::min(k, Kernel::kKC);
  return {RoundUp(kernel.ABytes(std::min(m, Kernel::kMC), depth), kLine),
          RoundUp(kernel.BBytes(std::min(n, Kernel::kNC), depth), kLine), kernel.OwnBytes(m, n, depth)};
}

// `scratch` has ScratchOf().bytes(), aligned to 64.
template <typename Kernel, typename Segment>
void BlockedGemm(const Kernel& kernel, const Segment* segments, size_t count, char* scratch) {
  const int64_t m = segments->m, n = segments->n;
  const KBlocks<Segment> blocks(segments, count, Kernel::kKC);
  const GemmScratch sizes = ScratchOf(kernel, m, n, blocks.k());
  char* const a = scratch;
  char* const b = a + sizes.a;
  for (const KBlock<Segment>& block : blocks) {
    for (int64_t left = 0; left < n; left += Kernel::kNC) {
      const int64_t cols = std::min(Kernel::kNC, n - left);
      kernel.PackB(block, left, cols, b);
      for (int64_t top = 0; top < m; top += Kernel::kMC) {
        const int64_t rows = std::min(Kernel::kMC, m - top);
        kernel.PackA(block, top, rows, a);
        const auto multiply = [&](int64_t row, int64_t col) {
          kernel.Multiply(
              block, {a + kernel.ABytes(row, block.depth), b + kernel.BBytes(col, block.depth), b + sizes.b},
              {top + row, std::min(Kernel::kMR, rows - row), left + col, std::min(Kernel::kNR, cols - col)});
        };
        if constexpr (Kernel::kReusesB) {
          for (int64_t col = 0; col < cols; col += Kernel::kNR) {
            for (int64_t row = 0; row < rows; row += Kernel::kMR) multiply(row, col);
          }
        } else {
          for (int64_t row = 0; row < rows; row += Kernel::kMR) {
            for (int64_t col = 0; col < cols; col += Kernel::kNR) multiply(row, col);
          }
        }
      }
    }
  }
}

template <typename Kernel>
void BlockedGemm(const Kernel& kernel, const KSegments& segments, char* scratch) {
  BlockedGemm(kernel, segments.data(), segments.size(), scratch);
}

}  // namespace jaxmp::hostmp
