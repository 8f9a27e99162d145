#include "csrc/hostmp/elementwise.h"

#include <cmath>
#include <cstring>

#include "csrc/hostmp/dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxmp::hostmp {
namespace {

// The bodies, written once; the compiler vectorises each inside a function for every instruction set below.

JAXMP_INLINE void widen_body(const BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

JAXMP_INLINE void narrow_body(const float* from, BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const uint32_t quiet_nan = bits | 0x400000;  // rounding could carry a NaN's mantissa into an infinity
    to[i].bits = static_cast<uint16_t>(((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded) >> 16);
  }
}

// e^x for x <= 0, to 1 ulp or so: x = n ln2 + r, e^r by its Taylor polynomial on |r| <= ln2 / 2, times 2^n.
JAXMP_INLINE float exp_of_negative(float x) {
  const bool is_tiny = x < -87.0f;  // the result would be subnormal
  x = is_tiny ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln2 in two parts, the first exact in n * part
  float p = 1.9841270e-4f;
  p = p * r + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t power;
  std::memcpy(&power, &shifted, sizeof(power));
  power = (power + 127) << 23;  // the low bits of `shifted` are n in two's complement
  float scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return is_tiny ? 0.0f : p * scale;
}
JAXMP_INLINE double exp_of_negative(double x) { return std::exp(x); }

// 1 + tanh(u) = 2 / (1 + e^-2u), which does not cancel for u << 0. With w = e^-2|u| it is 2 / (1 + w) for u >= 0 and
// 2w / (1 + w) below. A NaN passes through x.
template <typename T>
JAXMP_INLINE void gelu_body(T* values, int64_t count) {
  constexpr T kTwoSqrt2OverPi = T(1.5957691216057307118);
  for (int64_t i = 0; i < count; ++i) {
    const T x = values[i];
    const T twice_u = kTwoSqrt2OverPi * (x + T(0.044715) * x * x * x);
    const T w = exp_of_negative(twice_u < T(0) ? twice_u : -twice_u);
    values[i] = x * ((twice_u < T(0) ? w : T(1)) / (T(1) + w));
  }
}

// With s = 1 / (1 + e^-2u): s + x s (1 - s) 2u'. Beyond 32 the slope is 0 or 1 in every type, and x^2 may not overflow.
template <typename T>
JAXMP_INLINE void gelu_slope_body(T* values, int64_t count) {
  constexpr T kTwoSqrt2OverPi = T(1.5957691216057307118);
  for (int64_t i = 0; i < count; ++i) {
    T x = values[i];
    x = x < T(-32) ? T(-32) : x;
    x = x > T(32) ? T(32) : x;
    const T twice_u = kTwoSqrt2OverPi * (x + T(0.044715) * x * x * x);
    const T w = exp_of_negative(twice_u < T(0) ? twice_u : -twice_u);
    const T larger = T(1) / (T(1) + w), smaller = w / (T(1) + w);
    const T inner = kTwoSqrt2OverPi * (T(1) + T(0.134145) * x * x);
    values[i] = (twice_u < T(0) ? smaller : larger) + x * (larger * smaller) * inner;
  }
}

float widen_one(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return float_of(sign | (magnitude + 0x1c000) << 13);
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  return float_of(sign | bits_of(subnormal));
}

Float16 narrow_one(float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000) {  // subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
    const float sum = float_of(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of(sum) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
}

JAXMP_DISPATCH(widen, (const BFloat16* from, float* to, int64_t count), (from, to, count), widen_body(from, to, count))
JAXMP_DISPATCH(narrow, (const float* from, BFloat16* to, int64_t count), (from, to, count),
               narrow_body(from, to, count))
JAXMP_DISPATCH(gelu, (float* values, int64_t count), (values, count), gelu_body(values, count))
JAXMP_DISPATCH(gelu_slope, (float* values, int64_t count), (values, count), gelu_slope_body(values, count))

#if defined(__x86_64__)
JAXMP_AVX2 int64_t widen_f16c(const Float16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}
JAXMP_AVX2 int64_t narrow_f16c(const float* from, Float16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
  return i;
}
#else
int64_t widen_f16c(const Float16*, float*, int64_t) { return 0; }
int64_t narrow_f16c(const float*, Float16*, int64_t) { return 0; }
#endif

}  // namespace

void widen(const BFloat16* from, float* to, int64_t count) { widen_best(from, to, count); }
void narrow(const float* from, BFloat16* to, int64_t count) { narrow_best(from, to, count); }

void widen(const Float16* from, float* to, int64_t count) {
  for (int64_t i = cpu().avx2 ? widen_f16c(from, to, count) : 0; i < count; ++i) to[i] = widen_one(from[i]);
}
void narrow(const float* from, Float16* to, int64_t count) {
  for (int64_t i = cpu().avx2 ? narrow_f16c(from, to, count) : 0; i < count; ++i) to[i] = narrow_one(from[i]);
}

void gelu(float* values, int64_t count) { gelu_best(values, count); }
void gelu(double* values, int64_t count) { gelu_body(values, count); }

void gelu_slope(float* values, int64_t count) { gelu_slope_best(values, count); }
void gelu_slope(double* values, int64_t count) { gelu_slope_body(values, count); }

}  // namespace jaxmp::hostmp
