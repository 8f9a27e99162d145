// A register tile of 48 x 8 sums runs over a K block. The instruction multiplies pairs: for each of 16 rows it adds
// a[2p] b[2p] + a[2p+1] b[2p+1] to a float. So both operands are packed by pairs (pack_bf16.h): op(A) in micro-panels
// of 48 rows (the last one of 16, 32 or 48), op(B) in micro-panels of 16 columns, which are two register tiles.
#include <algorithm>

#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/pack_bf16.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kMaxVectors = 3;  // 3 x 8 sums, 3 of A and a broadcast of B fill the 32 registers
constexpr int64_t kCols = kBlock / 2;

constexpr int64_t kMaxPanels = 8;  // written side by side: their lines may all map to one set of the L1 cache

// The destination of a register tile: c = alpha sums + beta c.
struct Destination {
  float* c;
  int64_t ldc, rows, cols;
  float alpha, beta;
};

__mmask16 RowsOf(const Destination& to, int vector) {
  const int64_t left = to.rows - vector * kLanes;
  return left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(left, 0)) - 1);
}

template <int Vectors>
JAXMP_AVX512_BF16 void StoreTile(const Destination& to, const __m512 (&sums)[Vectors][kCols]) {
  const __m512 alpha = _mm512_set1_ps(to.alpha), beta = _mm512_set1_ps(to.beta);
  for (int64_t col = 0; col < to.cols; ++col) {
    for (int v = 0; v < Vectors; ++v) {
      const __mmask16 mask = RowsOf(to, v);
      float* const c = to.c + col * to.ldc + v * kLanes;
      __m512 value = _mm512_mul_ps(alpha, sums[v][col]);
      if (to.beta != 0) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, c), value);
      _mm512_mask_storeu_ps(c, mask, value);
    }
  }
}

template <int Vectors>
JAXMP_AVX512_BF16 inline void RegisterTile(const uint32_t* a, const uint32_t* b, int64_t pairs, const Destination& to) {
  __m512 sums[Vectors][kCols];
  for (int v = 0; v < Vectors; ++v) {
    for (int64_t col = 0; col < kCols; ++col) {
      sums[v][col] = _mm512_setzero_ps();
      __builtin_prefetch(to.c + col * to.ldc + v * kLanes, 1);  // c is read or written when the sums are ready
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair, a += Vectors * kLanes, b += kBlock) {
    __m512bh rows[Vectors];
    for (int v = 0; v < Vectors; ++v) rows[v] = (__m512bh)_mm512_loadu_si512(a + v * kLanes);
#pragma GCC unroll 8
    for (int64_t col = 0; col < kCols; ++col) {
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(b[col]));
      for (int v = 0; v < Vectors; ++v) sums[v][col] = _mm512_dpbf16_ps(sums[v][col], rows[v], weight);
    }
  }
  StoreTile<Vectors>(to, sums);
}

struct Avx512Bf16Kernel {
  static constexpr int64_t kKC = hostmp::kKC, kMR = kMaxVectors * kLanes, kNR = kBlock;
  static constexpr int64_t kMC = kMaxPanels * kMR, kNC = kUncut;  // 192 KiB of op(A), for the L2 cache
  static constexpr bool kReusesB = false;

  static int64_t Pairs(int64_t depth) { return (depth + 1) / 2; }
  int64_t ABytes(int64_t rows, int64_t depth) const { return 4 * Pairs(depth) * RoundUp(rows, kLanes); }
  int64_t BBytes(int64_t cols, int64_t depth) const { return 4 * Pairs(depth) * RoundUp(cols, kBlock); }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 0; }

  void PackA(const KBlock<Product>& block, int64_t top, int64_t rows, char* to) const {
    for (const KSlice<Product>& slice : block) PackSlice<kMR>(slice, ViewOfA(slice), top, rows, block.depth, to);
  }
  void PackB(const KBlock<Product>& block, int64_t left, int64_t cols, char* to) const {
    for (const KSlice<Product>& slice : block) PackSlice<kNR>(slice, ViewOfB(slice), left, cols, block.depth, to);
  }

  // Packs micro-panels of `Width` indices; the last one may be narrower.
  template <int64_t Width>
  static void PackSlice(const KSlice<Product>& slice, const Bf16View& from, int64_t begin, int64_t count, int64_t depth,
                        char* to) {
    const int64_t step = Width * Pairs(depth), line = slice.offset / 2;
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    const int64_t whole = from.is_adjacent_in_k ? 0 : count / Width;
    for (int64_t panel = 0; panel < whole; panel += kMaxPanels) {
      PackPanelsByPairs(from, begin + panel * Width, std::min(kMaxPanels, whole - panel), Width, slice.depth, step,
                        words + panel * step + line * Width);
    }
    for (int64_t i = whole * Width; i < count; i += Width) {
      const int64_t width = std::min(Width, RoundUp(count - i, kLanes));
      PackByPairs(from, begin + i, count - i, width, slice.depth, Pairs(slice.depth),
                  words + i / Width * step + line * width);
    }
  }

  JAXMP_AVX512_BF16 void Multiply(const KBlock<Product>& block, const Packed& packed, const CTile& tile) const {
    const auto* const a = reinterpret_cast<const uint32_t*>(packed.a);
    const auto* const b = reinterpret_cast<const uint32_t*>(packed.b);
    float* const c = static_cast<float*>(p.c) + tile.col * p.ldc + tile.row;
    for (int64_t col = 0; col < tile.cols; col += kCols) {
      const Destination to = {
          c + col * p.ldc, p.ldc, tile.rows, std::min(kCols, tile.cols - col), alpha, block.first == 0 ? beta : 1.0f};
      switch (CeilDiv(tile.rows, kLanes)) {
        case 1:
          RegisterTile<1>(a, b + col, Pairs(block.depth), to);
          break;
        case 2:
          RegisterTile<2>(a, b + col, Pairs(block.depth), to);
          break;
        default:
          RegisterTile<3>(a, b + col, Pairs(block.depth), to);
      }
    }
  }

  Product p;
  float alpha, beta;
};

}  // namespace

void Avx512Bf16Gemm(const KSegments& segments, float alpha, float beta, char* scratch) {
  BlockedGemm(Avx512Bf16Kernel{segments.front(), alpha, beta}, segments, scratch);
}

int64_t Avx512Bf16GemmScratch(int64_t m, int64_t n, int64_t k) {
  return ScratchOf(Avx512Bf16Kernel{}, m, n, k).bytes();
}

}  // namespace jaxmp::hostmp

#endif
