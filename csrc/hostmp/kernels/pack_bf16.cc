#include "csrc/hostmp/kernels/pack_bf16.h"

#include <algorithm>

#include "csrc/hostmp/cpu/avx512.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kPairs = kBlock;  // of a block

__mmask16 First16(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << std::max<int64_t>(count, 0)) - 1);
}
__mmask32 First32(int64_t count) { return count >= 32 ? 0xffffffffu : (1u << std::max<int64_t>(count, 0)) - 1; }

// Transposes 16 x 16 words in four rounds of 2 x 2 transpositions: of words, pairs of words, and then of quarters.
JAXMP_AVX512_BF16 inline void Transpose(__m512i (&r)[kBlock]) {
  __m512i s[kBlock];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 8) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      s[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
      s[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(s[j], s[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(s[j], s[8 + j], 0xdd);
  }
}

// Packs one block from `index` and `k` on; `count` indices and `depth` numbers along k exist. Writes the first `lines`.
//
// Prefetches the next block, because its lines are a leading dimension apart, where the processor does not look. A
// prefetch from beyond the operand does nothing.
template <bool ByPairs>
JAXMP_AVX512_BF16 inline void PackBlock(const Bf16View& view, int64_t index, int64_t count, int64_t k, int64_t depth,
                                        uint32_t* to, int64_t stride, int64_t lines) {
  __m512i r[kBlock];
  if (view.is_adjacent_in_k) {
    const uint16_t* const from = view.data + index * view.ld + k;
    const __mmask32 mask = First32(depth);
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      __builtin_prefetch(from + (kBlock + i) * view.ld);
      r[i] = i < count ? _mm512_maskz_loadu_epi16(mask, from + i * view.ld) : _mm512_setzero_si512();
    }
  } else {
    const uint16_t* const from = view.data + k * view.ld + index;
    const __mmask16 mask = First16(count);
    const auto widened = [&](int64_t row) JAXMP_AVX512_BF16 {
      return row < depth ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + row * view.ld))
                         : _mm512_setzero_si512();
    };
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; ++p) {
      r[p] = _mm512_or_si512(widened(2 * p), _mm512_slli_epi32(widened(2 * p + 1), 16));
    }
  }
  if (view.is_adjacent_in_k == ByPairs) Transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; ++i) {
    if (i < lines) _mm512_storeu_si512(to + i * stride, r[i]);
  }
}

// Packs one line of pairs from two lines of `count` numbers that are adjacent across k; `odd` may be null. The output
// moves on by `step` words after every `width` words.
JAXMP_AVX512_BF16 inline void Interleave(const uint16_t* even, const uint16_t* odd, int64_t count, int64_t width,
                                         int64_t step, uint32_t* to) {
  constexpr int64_t kWords = 16;
  // Word i of the result is word i / 2 of the even or the odd line.
  const __m512i steps = _mm512_set1_epi32(0x00200000);
  const __m512i words = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                           _mm512_set1_epi32(0x00010001));
  const __m512i low = _mm512_or_si512(words, steps);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kWords));
  int64_t at = 0;  // in the micro-panel
  const auto put = [&](__m512i pairs) JAXMP_AVX512_BF16 {
    _mm512_storeu_si512(to + at, pairs);
    at += kWords;
    if (at == width) to += step, at = 0;
  };
  for (int64_t i = 0; i < count; i += 2 * kWords) {
    const __mmask32 mask = First32(count - i);
    const __m512i x = _mm512_maskz_loadu_epi16(mask, even + i);
    const __m512i y = _mm512_maskz_loadu_epi16(odd ? mask : 0, odd + i);
    put(_mm512_permutex2var_epi16(x, low, y));
    if (i + kWords < count) put(_mm512_permutex2var_epi16(x, high, y));
  }
}

}  // namespace

JAXMP_AVX512_BF16 void PackByPairs(const Bf16View& view, int64_t begin, int64_t count, int64_t width, int64_t depth,
                                   int64_t pairs, uint32_t* to) {
  for (int64_t i = 0; i < width; i += kBlock) {
    for (int64_t p = 0; p < pairs; p += kPairs) {
      PackBlock<true>(view, begin + i, count - i, 2 * p, depth - 2 * p, to + p * width + i, width, pairs - p);
    }
  }
}

JAXMP_AVX512_BF16 void PackPanelsByPairs(const Bf16View& view, int64_t begin, int64_t panels, int64_t width,
                                         int64_t depth, int64_t step, uint32_t* to) {
  constexpr int64_t kAhead = 4, kNumbers = 32;  // kNumbers: of a cache line
  for (int64_t k = 0; k < depth; k += 2, to += width) {
    const uint16_t* const even = view.data + k * view.ld + begin;
    const uint16_t* const odd = k + 1 < depth ? even + view.ld : nullptr;
    for (int64_t i = 0; i < panels * width; i += kNumbers) {
      __builtin_prefetch(even + kAhead * view.ld + i);
      __builtin_prefetch(even + (kAhead + 1) * view.ld + i);
    }
    Interleave(even, odd, panels * width, width, step, to);
  }
}

JAXMP_AVX512_BF16 void PackByIndices(const Bf16View& view, int64_t begin, int64_t count, int64_t depth, uint32_t* to) {
  for (int64_t k = 0; k < depth; k += 2 * kPairs, to += kBlock * kPairs) {
    PackBlock<false>(view, begin, count, k, depth - k, to, kPairs, kBlock);
  }
}

}  // namespace jaxmp::hostmp

#endif
