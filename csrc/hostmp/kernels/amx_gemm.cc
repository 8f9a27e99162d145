// op(A) is packed by pairs in micro-panels of 32 rows, op(B) by indices in micro-panels of 16 columns (pack_bf16.h). A
// tile register holds 16 lines of 64 bytes, and the instruction multiplies 16 lines of one by 16 lines of another. C is
// column-major, so a line of sums is a column of C, and the instruction's rows are columns of op(B). Two by two tiles
// of sums, and two micro-panels of each operand, fill the eight registers.
//
// Each sum runs over a K block in ascending order, alone in its lane, for any extents.
#include <algorithm>

#include "csrc/hostmp/kernels/amx_tiles.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/pack_bf16.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kTile = 2 * kBlock;  // rows and columns of C that the four registers of sums hold
constexpr int64_t kWordsOfBlock = kBlock * kBlock;
constexpr int64_t kLine = 64;  // bytes of a tile register's line

// Multiplies two micro-panels of `blocks` blocks: 32 x 32 floats.
JAXMP_AMX void MultiplyMicroPanels(const uint32_t* a, const uint32_t* b, int64_t blocks, float* to, int64_t ld) {
  const auto stride = static_cast<size_t>(4 * ld);
  asm volatile("" ::: "memory");  // GCC 12's _tile_loadd does not say that it reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint32_t* const b_right = b + blocks * kWordsOfBlock;
  for (int64_t i = 0; i < blocks; ++i) {
    _tile_loadd(4, a + i * 2 * kWordsOfBlock, 2 * kLine);
    _tile_loadd(6, b + i * kWordsOfBlock, kLine);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, a + i * 2 * kWordsOfBlock + kBlock, 2 * kLine);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, b_right + i * kWordsOfBlock, kLine);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, to, stride);
  _tile_stored(1, to + kBlock, stride);
  _tile_stored(2, to + kBlock * ld, stride);
  _tile_stored(3, to + kBlock * ld + kBlock, stride);
}

// c = alpha sums + beta c, for at most 32 x 32 sums.
JAXMP_AMX void Store(const float* sums, float alpha_value, float beta_value, int64_t rows, int64_t cols, float* to,
                     int64_t ldc) {
  const __m512 alpha = _mm512_set1_ps(alpha_value), beta = _mm512_set1_ps(beta_value);
  for (int64_t row = 0; row < rows; row += kBlock) {
    const auto mask = static_cast<__mmask16>(0xffff >> std::max<int64_t>(0, row + kBlock - rows));
    for (int64_t col = 0; col < cols; ++col) {
      float* const c = to + col * ldc + row;
      __m512 value = _mm512_mul_ps(alpha, _mm512_load_ps(sums + col * kTile + row));
      if (beta_value != 0) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, c), value);
      _mm512_mask_storeu_ps(c, mask, value);
    }
  }
}

struct AmxKernel {
  static constexpr int64_t kKC = kAmxKC, kMR = kTile, kNR = kTile;
  static constexpr int64_t kNC = 512;        // a K block of 512 columns has 1 MiB, for the L2 cache
  static constexpr int64_t kMC = 8 * kTile;  // 512 KiB
  static constexpr bool kReusesB = false;

  static int64_t Blocks(int64_t depth) { return CeilDiv(depth, kTile); }
  int64_t ABytes(int64_t rows, int64_t depth) const { return 8 * kWordsOfBlock * Blocks(depth) * CeilDiv(rows, kTile); }
  int64_t BBytes(int64_t cols, int64_t depth) const { return ABytes(cols, depth); }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 0; }

  // If rows are adjacent, whole micro-panels are packed together (pack_bf16.h), as far as k fills whole blocks.
  void PackA(const KBlock<Product>& block, int64_t top, int64_t rows, char* to) const {
    const int64_t step = ABytes(kTile, block.depth) / 4;
    for (const KSlice<Product>& slice : block) {
      const bool is_plain = slice.segment->trans_a == abi::CUBLAS_OP_N;
      const int64_t panels = is_plain ? rows / kTile : 0, deep = slice.depth / kTile * kTile;
      uint32_t* const lines = Words(to) + slice.offset / 2 * kTile;
      PackPanelsByPairs(ViewOfA(slice), top, panels, kTile, deep, step, lines);
      for (int64_t panel = 0; panel < CeilDiv(rows, kTile); ++panel) {
        const int64_t row = panel * kTile, done = panel < panels ? deep : 0, left = slice.depth - done;
        PackByPairs(ViewOfA({slice.segment, slice.k + done, 0, 0}), top + row, rows - row, kTile, left,
                    RoundUp(left, kTile) / 2, lines + panel * step + done / 2 * kTile);
      }
    }
  }

  void PackB(const KBlock<Product>& block, int64_t left, int64_t cols, char* to) const {
    for (int64_t col = 0; col < RoundUp(cols, kTile); col += kBlock) {
      for (const KSlice<Product>& slice : block) {
        PackByIndices(ViewOfB(slice), left + col, cols - col, slice.depth,
                      Words(to) + (col / kBlock * Blocks(block.depth) + slice.offset / kTile) * kWordsOfBlock);
      }
    }
  }

  // Whole tiles of sums that neither alpha nor beta changes go straight to C. Others go through memory, because no
  // instruction adds from a tile register.
  JAXMP_AMX void Multiply(const KBlock<Product>& block, const Packed& packed, const CTile& tile) const {
    const auto* const a = reinterpret_cast<const uint32_t*>(packed.a);
    const auto* const b = reinterpret_cast<const uint32_t*>(packed.b);
    float* const c = static_cast<float*>(p.c) + tile.col * p.ldc + tile.row;
    const float beta_of_block = block.first == 0 ? beta : 1.0f;
    if (alpha == 1 && beta_of_block == 0 && tile.rows == kTile && tile.cols == kTile) {
      return MultiplyMicroPanels(a, b, Blocks(block.depth), c, p.ldc);
    }
    alignas(64) float sums[kTile * kTile];
    MultiplyMicroPanels(a, b, Blocks(block.depth), sums, kTile);
    Store(sums, alpha, beta_of_block, tile.rows, tile.cols, c, p.ldc);
  }

  static uint32_t* Words(char* bytes) { return reinterpret_cast<uint32_t*>(bytes); }

  Product p;
  float alpha, beta;
};

}  // namespace

void AmxGemm(const KSegments& segments, float alpha, float beta, char* scratch) {
  const ScopedTiles tiles;
  BlockedGemm(AmxKernel{segments.front(), alpha, beta}, segments, scratch);
}

int64_t AmxGemmScratch(int64_t m, int64_t n, int64_t k) { return ScratchOf(AmxKernel{}, m, n, k).bytes(); }

}  // namespace jaxmp::hostmp

#endif
