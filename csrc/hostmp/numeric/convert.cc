#include "csrc/hostmp/numeric/convert.h"

#include "csrc/hostmp/cpu/dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxmp::hostmp {
namespace {

// The bodies, written once; the compiler vectorises them for every instruction set below.

JAXMP_INLINE void WidenBody(const BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = FloatOf(uint32_t{from[i].bits} << 16);
}

JAXMP_INLINE void DownconvertBody(const float* from, BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = BitsOf(from[i]);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const uint32_t quiet_nan = bits | 0x400000;  // rounding could carry a NaN's mantissa into an infinity
    to[i].bits = static_cast<uint16_t>(((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded) >> 16);
  }
}

float WidenOne(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return FloatOf(sign | (magnitude + 0x1c000) << 13);
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  return FloatOf(sign | BitsOf(subnormal));
}

Float16 DownconvertOne(float value) {
  const uint32_t bits = BitsOf(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000) {  // subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    const float sum = FloatOf(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (BitsOf(sum) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

JAXMP_DISPATCH(Widen, (const BFloat16* from, float* to, int64_t count), (from, to, count), WidenBody(from, to, count))
JAXMP_DISPATCH(Downconvert, (const float* from, BFloat16* to, int64_t count), (from, to, count),
               DownconvertBody(from, to, count))

// Converts as many numbers as fill whole vectors, by the processor's own instructions, and returns how many.
#if defined(__x86_64__)
JAXMP_AVX2 int64_t WidenVectors(const Float16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}
JAXMP_AVX2 int64_t DownconvertVectors(const float* from, Float16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
  return i;
}
#elif defined(__aarch64__)
int64_t WidenVectors(const Float16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from[i].bits))));
  return i;
}
int64_t DownconvertVectors(const float* from, Float16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) vst1_u16(&to[i].bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
  return i;
}
#else
int64_t WidenVectors(const Float16*, float*, int64_t) { return 0; }
int64_t DownconvertVectors(const float*, Float16*, int64_t) { return 0; }
#endif

bool HasVectors() { return cpu().avx2 || cpu().neon; }

}  // namespace

void Widen(const BFloat16* from, float* to, int64_t count) { WidenBest(from, to, count); }
void Downconvert(const float* from, BFloat16* to, int64_t count) { DownconvertBest(from, to, count); }

void Widen(const Float16* from, float* to, int64_t count) {
  for (int64_t i = HasVectors() ? WidenVectors(from, to, count) : 0; i < count; ++i) to[i] = WidenOne(from[i]);
}
void Downconvert(const float* from, Float16* to, int64_t count) {
  for (int64_t i = HasVectors() ? DownconvertVectors(from, to, count) : 0; i < count; ++i)
    to[i] = DownconvertOne(from[i]);
}

}  // namespace jaxmp::hostmp
