// The usual three levels: k is cut into panels (panels.h), op(A) and op(B) are packed a panel at a time, and a register
// tile of 48 x 8 sums over the panel. The instruction multiplies pairs: for each of 16 rows it adds
// a[2p] b[2p] + a[2p+1] b[2p+1] to a float. So both are packed in strips (bf16_pack.h): op(A) in strips of 48 rows (the
// last one of 16, 32 or 48), op(B) in strips of 16 columns, two register tiles.
#include "csrc/hostmp/kernels/avx512_bf16_gemm.h"

#include <algorithm>

#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/pack_bf16.h"
#include "csrc/hostmp/kernels/bf16_small_n.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kMaxVectors = 3;  // 3 x 8 sums, 3 of A and a broadcast of B fill the 32 registers
constexpr int64_t kRows = kMaxVectors * kLanes;
constexpr int64_t kCols = kBlock / 2;

// Where a register tile goes.
struct Target {
  float* c;
  int64_t ldc, rows, cols;
  float alpha, beta;
};

__mmask16 rows_of(const Target& target, int vector) {
  const int64_t left = target.rows - vector * kLanes;
  return left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(left, 0)) - 1);
}

template <int Vectors>
JAXMP_AVX512_BF16 void store_tile(const Target& target, const __m512 (&sums)[Vectors][kCols]) {
  const __m512 alpha = _mm512_set1_ps(target.alpha), beta = _mm512_set1_ps(target.beta);
  for (int64_t col = 0; col < target.cols; ++col) {
    for (int v = 0; v < Vectors; ++v) {
      const __mmask16 mask = rows_of(target, v);
      float* const to = target.c + col * target.ldc + v * kLanes;
      __m512 value = _mm512_mul_ps(alpha, sums[v][col]);
      if (target.beta != 0) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, to), value);
      _mm512_mask_storeu_ps(to, mask, value);
    }
  }
}

template <int Vectors>
JAXMP_AVX512_BF16 inline void register_tile(const uint32_t* a, const uint32_t* b, int64_t pairs, const Target& target) {
  __m512 sums[Vectors][kCols];
  for (int v = 0; v < Vectors; ++v) {
    for (int64_t col = 0; col < kCols; ++col) sums[v][col] = _mm512_setzero_ps();
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
  store_tile<Vectors>(target, sums);
}

// One strip of A against all of packed B.
JAXMP_AVX512_BF16 void strip_product(const uint32_t* a, int64_t width, const uint32_t* packed_b, int64_t n,
                                     int64_t pairs, Target target) {
  for (int64_t col = 0; col < n; col += kCols, target.c += kCols * target.ldc) {
    const uint32_t* const b = packed_b + col / kBlock * kBlock * pairs + col % kBlock;
    target.cols = std::min(kCols, n - col);
    switch (width / kLanes) {
      case 1:
        register_tile<1>(a, b, pairs, target);
        break;
      case 2:
        register_tile<2>(a, b, pairs, target);
        break;
      default:
        register_tile<3>(a, b, pairs, target);
    }
  }
}

// The pairs of a segment to their place in a strip.
void pack_segment(const Segment& segment, const Panel& from, int64_t begin, int64_t count, int64_t width,
                  uint32_t* strip) {
  pack_by_pairs(from, begin, count, width, segment.depth, (segment.depth + 1) / 2, strip + segment.offset / 2 * width);
}

}  // namespace

void bf16_gemm(const Parts& parts, float alpha, float beta, char* scratch) {
  if (bf16_thin_gemm(Bf16Sums::kAvx512Bf16, parts, alpha, beta)) return;
  const Product& p = parts.front();
  const std::vector<KPanel> panels = panels_of(parts, kOrderedPanel);
  uint32_t* const strip_a = reinterpret_cast<uint32_t*>(scratch);
  uint32_t* const packed_b = strip_a + kRows * ((panels.front().depth + 1) / 2);
  for (const KPanel& panel : panels) {
    const int64_t pairs = (panel.depth + 1) / 2;
    for (int64_t col = 0; col < p.n; col += kBlock) {
      for (const Segment& segment : panel.segments) {
        pack_segment(segment, panel_of_b(segment), col, p.n - col, kBlock, packed_b + col * pairs);
      }
    }
    for (int64_t row = 0; row < p.m; row += kRows) {
      const int64_t rows = std::min(kRows, p.m - row), width = round_up(rows, kLanes);
      for (const Segment& segment : panel.segments) {
        pack_segment(segment, panel_of_a(segment), row, rows, width, strip_a);
      }
      strip_product(strip_a, width, packed_b, p.n, pairs,
                    {static_cast<float*>(p.c) + row, p.ldc, rows, 0, alpha, panel.begin == 0 ? beta : 1.0f});
    }
  }
}

int64_t bf16_gemm_scratch(int64_t, int64_t n, int64_t k) {
  return 4 * ((std::min(k, kOrderedPanel) + 1) / 2) * (kRows + round_up(n, kBlock));
}

}  // namespace jaxmp::hostmp

#else

namespace jaxmp::hostmp {

void bf16_gemm(const Parts&, float, float, char*) {}
int64_t bf16_gemm_scratch(int64_t, int64_t, int64_t) { return 0; }

}  // namespace jaxmp::hostmp

#endif
