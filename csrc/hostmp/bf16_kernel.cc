// The usual three levels: k is cut into panels, op(A) and op(B) are packed a panel at a time, and a register tile of
// 48 x 8 sums over the panel. The instruction multiplies pairs: for each of 16 rows it adds
// a[2p] b[2p] + a[2p+1] b[2p+1] to a float. So both packed forms hold pairs of numbers that follow each other in k:
//
//   packed A: strips of 48 rows (the last one of 16, 32 or 48), in each, pair by pair, one 32-bit word per row
//   packed B: strips of 8 columns, in each, pair by pair, one 32-bit word per column
//
// Rows, columns and an odd k are padded with zeros.
#include "csrc/hostmp/bf16_kernel.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)

#include <immintrin.h>

namespace jaxmp::hostmp {
namespace {

#define JAXMP_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

constexpr int64_t kLanes = 16;
constexpr int kMaxVectors = 3;  // 3 x 8 sums, 3 of A and a broadcast of B fill the 32 registers
constexpr int64_t kRows = kMaxVectors * kLanes;
constexpr int64_t kCols = 8;
constexpr int64_t kDepth = 512;  // a strip of B is then 8 KiB, a strip of A 48 KiB

// A stored operand whose numbers are either adjacent along k, or along the other dimension.
struct Source {
  const uint16_t* data;
  int64_t ld;
  bool is_adjacent_in_k;
};

uint32_t pair_at(const Source& source, int64_t index, int64_t k, int64_t depth) {
  const int64_t along_k = source.is_adjacent_in_k ? 1 : source.ld;
  const uint16_t* const first = source.data + index * (source.is_adjacent_in_k ? source.ld : 1) + k * along_k;
  const uint32_t low = first[0];
  return k + 1 < depth ? low | static_cast<uint32_t>(first[along_k]) << 16 : low;
}

// 8 indices of full pairs, adjacent in the index: two vectors are interleaved.
JAXMP_AVX512_BF16 inline __m256i widen_words(const uint16_t* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
JAXMP_AVX512_BF16 void pack_across(const Source& source, int64_t index, int64_t pairs, int64_t stride, uint32_t* to) {
  const uint16_t* from = source.data + index;
  for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * source.ld, to += stride) {
    const __m256i odd = _mm256_slli_epi32(widen_words(from + source.ld), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(widen_words(from), odd));
  }
}

// The same where the numbers are adjacent in k: pairs are whole words already, and 8 x 8 of them are transposed.
JAXMP_AVX512_BF16 void pack_along(const Source& source, int64_t index, int64_t pairs, int64_t stride, uint32_t* to) {
  const uint16_t* const from = source.data + index * source.ld;
  for (int64_t pair = 0; pair < pairs; pair += 8) {
    __m256i r[8], s[8];
    for (int i = 0; i < 8; ++i) {
      r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * source.ld + 2 * pair));
    }
    for (int i = 0; i < 8; i += 2) {
      s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
      s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
      r[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (pair + i) * stride),
                          _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (pair + 4 + i) * stride),
                          _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
    }
  }
}

// Packs `count` indices as one strip of `width`, which is a multiple of 8.
JAXMP_AVX512_BF16 void pack_strip(const Source& source, int64_t begin, int64_t count, int64_t width, int64_t depth,
                                  uint32_t* to) {
  const int64_t pairs = (depth + 1) / 2;
  const int64_t done_pairs = source.is_adjacent_in_k ? depth / 16 * 8 : depth / 2;
  int64_t done = 0;
  for (; done + 8 <= count; done += 8) {
    source.is_adjacent_in_k ? pack_along(source, begin + done, done_pairs, width, to + done)
                            : pack_across(source, begin + done, done_pairs, width, to + done);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    for (int64_t i = pair < done_pairs ? done : 0; i < width; ++i) {
      to[pair * width + i] = i < count ? pair_at(source, begin + i, 2 * pair, depth) : 0;
    }
  }
}

// Where a register tile goes.
struct Target {
  float* c;
  int64_t ldc, rows, cols;
  float alpha, beta;
};

template <int Vectors>
JAXMP_AVX512_BF16 void store_tile(const Target& target, const __m512 (&sums)[Vectors][kCols]) {
  const __m512 alpha = _mm512_set1_ps(target.alpha), beta = _mm512_set1_ps(target.beta);
  for (int64_t col = 0; col < target.cols; ++col) {
    for (int v = 0; v < Vectors; ++v) {
      const int64_t left = target.rows - v * kLanes;
      const __mmask16 mask = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(left, 0)) - 1);
      float* const to = target.c + col * target.ldc + v * kLanes;
      __m512 value = _mm512_mul_ps(alpha, sums[v][col]);
      if (target.beta != 0) value = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(mask, to), value);
      _mm512_mask_storeu_ps(to, mask, value);
    }
  }
}

template <int Vectors>
JAXMP_AVX512_BF16 void register_tile(const uint32_t* a, const uint32_t* b, int64_t pairs, const Target& target) {
  __m512 sums[Vectors][kCols];
  for (int v = 0; v < Vectors; ++v) {
    for (int64_t col = 0; col < kCols; ++col) sums[v][col] = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < pairs; ++pair, a += Vectors * kLanes, b += kCols) {
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
  for (int64_t col = 0; col < n; col += kCols, target.c += kCols * target.ldc, packed_b += kCols * pairs) {
    target.cols = std::min(kCols, n - col);
    switch (width / kLanes) {
      case 1:
        register_tile<1>(a, packed_b, pairs, target);
        break;
      case 2:
        register_tile<2>(a, packed_b, pairs, target);
        break;
      default:
        register_tile<3>(a, packed_b, pairs, target);
    }
  }
}

}  // namespace

void bf16_gemm(const Product& p, float alpha, float beta, char* scratch) {
  const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
  uint32_t* const strip_a = reinterpret_cast<uint32_t*>(scratch);
  uint32_t* const packed_b = strip_a + kRows * ((std::min(p.k, kDepth) + 1) / 2);
  for (int64_t at = 0; at < p.k; at += kDepth) {
    const int64_t depth = std::min(kDepth, p.k - at), pairs = (depth + 1) / 2;
    const Source a = {static_cast<const uint16_t*>(p.a) + at * (is_a_plain ? p.lda : 1), p.lda, !is_a_plain};
    const Source b = {static_cast<const uint16_t*>(p.b) + at * (is_b_plain ? 1 : p.ldb), p.ldb, is_b_plain};
    for (int64_t col = 0; col < p.n; col += kCols) {
      pack_strip(b, col, std::min(kCols, p.n - col), kCols, depth, packed_b + col * pairs);
    }
    for (int64_t row = 0; row < p.m; row += kRows) {
      const int64_t rows = std::min(kRows, p.m - row), width = round_up(rows, kLanes);
      pack_strip(a, row, rows, width, depth, strip_a);
      strip_product(strip_a, width, packed_b, p.n, pairs,
                    {static_cast<float*>(p.c) + row, p.ldc, rows, 0, alpha, at == 0 ? beta : 1.0f});
    }
  }
}

int64_t bf16_gemm_scratch(int64_t, int64_t n, int64_t k) {
  return 4 * ((std::min(k, kDepth) + 1) / 2) * (kRows + round_up(n, kCols));
}

}  // namespace jaxmp::hostmp

#else

namespace jaxmp::hostmp {

void bf16_gemm(const Product&, float, float, char*) {}
int64_t bf16_gemm_scratch(int64_t, int64_t, int64_t) { return 0; }

}  // namespace jaxmp::hostmp

#endif
