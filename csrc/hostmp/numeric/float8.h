// float8 by the processor's conversion of f16: E5M2 is the upper half of f16, and E4M3's bits, moved into place, are
// 2^-8 times the number. Unlike arithmetic, this conversion keeps subnormal numbers on threads that flush them to 0.
#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/hostmp/cpu/avx512.h"

namespace jaxmp::hostmp {

struct Float8E4m3 {
  uint8_t bits;
};
struct Float8E5m2 {
  uint8_t bits;
};
void Widen(const Float8E4m3* from, float* to, int64_t count);
void Widen(const Float8E5m2* from, float* to, int64_t count);

#if defined(__x86_64__)
#define JAXMP_FLOAT8(isa) __attribute__((target(isa))) inline __attribute__((always_inline))

JAXMP_FLOAT8("avx2") __m256i HalvesOf(__m128i bytes, Float8E5m2) {
  return _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 8);
}
JAXMP_FLOAT8("avx2") __m256i HalvesOf(__m128i bytes, Float8E4m3) {
  const __m256i top_bits = _mm256_set1_epi16(-0x200), all_but_bit_14 = _mm256_set1_epi16(-0x4001);
  const __m256i raised = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign in bits 15 and 14
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(raised, 2), top_bits);
  return _mm256_or_si256(_mm256_and_si256(raised, all_but_bit_14), _mm256_srli_epi16(is_nan, 1));
}

template <typename Float8>
JAXMP_FLOAT8("avx2,f16c")
__m256 Widen8(const Float8* from) {
  const __m256i halves = HalvesOf(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), Float8{});
  const __m256 value = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  return std::is_same_v<Float8, Float8E5m2> ? value : _mm256_mul_ps(value, _mm256_set1_ps(256));
}
template <typename Float8>
JAXMP_FLOAT8("avx2,avx512f")
__m512 Widen16(const Float8* from) {
  const __m256i halves = HalvesOf(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), Float8{});
  const __m512 value = _mm512_cvtph_ps(halves);
  return std::is_same_v<Float8, Float8E5m2> ? value : _mm512_mul_ps(value, _mm512_set1_ps(256));
}
#undef JAXMP_FLOAT8
#endif

}  // namespace jaxmp::hostmp
