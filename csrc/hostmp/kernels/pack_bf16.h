// Packs bf16 operands in the order that the kernels read.
//
// Both instructions, AVX512_BF16's and AMX's, multiply pairs: they add a[2p] b[2p] + a[2p+1] b[2p+1] to a float. So two
// numbers that follow each other in k make one 32-bit word, and a block is 16 pairs of 16 indices (rows of op(A), or
// columns of op(B)): 1 KiB, one AMX tile. It is packed by pairs (word i of line p is pair p of index i), or by indices
// (word p of line i is this pair). Numbers beyond the operand are packed as zeros.
#pragma once

#include <cstdint>

#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

constexpr int64_t kBlock = 16;

// A stored operand from some k on; its numbers are adjacent either along k or along the other dimension.
struct Bf16View {
  const uint16_t* data;
  int64_t ld;
  bool is_adjacent_in_k;
};

inline Bf16View ViewOfA(const KSlice<Product>& slice) {
  const Product& p = *slice.segment;
  const bool is_plain = p.trans_a == abi::CUBLAS_OP_N;
  return {static_cast<const uint16_t*>(p.a) + slice.k * (is_plain ? p.lda : 1), p.lda, !is_plain};
}
inline Bf16View ViewOfB(const KSlice<Product>& slice) {
  const Product& p = *slice.segment;
  const bool is_plain = p.trans_b == abi::CUBLAS_OP_N;
  return {static_cast<const uint16_t*>(p.b) + slice.k * (is_plain ? 1 : p.ldb), p.ldb, is_plain};
}

// Packs a micro-panel by pairs: `count` indices from `begin` on, padded to `width` (a multiple of 16), in `pairs` lines
// of `width` words. `pairs` is at least ceil(depth / 2).
void PackByPairs(const Bf16View& from, int64_t begin, int64_t count, int64_t width, int64_t depth, int64_t pairs,
                 uint32_t* to);

// Packs whole micro-panels of `width` indices by pairs, `step` words apart, from numbers that are not adjacent in k.
// Reads every k along all panels: long runs, because a large leading dimension puts each k on another page.
void PackPanelsByPairs(const Bf16View& from, int64_t begin, int64_t panels, int64_t width, int64_t depth, int64_t step,
                       uint32_t* to);

// Packs 16 indices (`count` exist) by indices, in ceil(depth / 32) blocks.
void PackByIndices(const Bf16View& from, int64_t begin, int64_t count, int64_t depth, uint32_t* to);

}  // namespace jaxmp::hostmp
