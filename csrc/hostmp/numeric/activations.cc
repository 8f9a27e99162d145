#include "csrc/hostmp/numeric/activations.h"

#include <cmath>

#include "csrc/hostmp/cpu/dispatch.h"

namespace jaxmp::hostmp {
namespace {

// The bodies, written once; the compiler vectorises them for every instruction set below.

// e^x for x <= 0, to 1 ulp or so: x = n ln2 + r, e^r by its Taylor polynomial on |r| <= ln2 / 2, times 2^n.
JAXMP_INLINE float ExpOfNegative(float x) {
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
  const float scale = FloatOf((BitsOf(shifted) + 127) << 23);  // the low bits of `shifted` are n in two's complement
  return is_tiny ? 0.0f : p * scale;
}
JAXMP_INLINE double ExpOfNegative(double x) { return std::exp(x); }

// 1 + tanh(u) = 2 / (1 + e^-2u), which does not cancel for u << 0. With w = e^-2|u| it is 2 / (1 + w) for u >= 0 and 2w
// / (1 + w) for u < 0. A NaN passes through x.
template <typename T>
JAXMP_INLINE void GeluBody(T* values, int64_t count) {
  constexpr T kTwoSqrt2OverPi = T(1.5957691216057307118);
  for (int64_t i = 0; i < count; ++i) {
    const T x = values[i];
    const T twice_u = kTwoSqrt2OverPi * (x + T(0.044715) * x * x * x);
    const T w = ExpOfNegative(twice_u < T(0) ? twice_u : -twice_u);
    values[i] = x * ((twice_u < T(0) ? w : T(1)) / (T(1) + w));
  }
}

// With s = 1 / (1 + e^-2u): s + x s (1 - s) 2u'. x is clamped: beyond 32 the slope is 0 or 1, and x^2 may overflow.
template <typename T>
JAXMP_INLINE void GeluSlopeBody(T* values, int64_t count) {
  constexpr T kTwoSqrt2OverPi = T(1.5957691216057307118);
  for (int64_t i = 0; i < count; ++i) {
    T x = values[i];
    x = x < T(-32) ? T(-32) : x;
    x = x > T(32) ? T(32) : x;
    const T twice_u = kTwoSqrt2OverPi * (x + T(0.044715) * x * x * x);
    const T w = ExpOfNegative(twice_u < T(0) ? twice_u : -twice_u);
    const T larger = T(1) / (T(1) + w), smaller = w / (T(1) + w);
    const T inner = kTwoSqrt2OverPi * (T(1) + T(0.134145) * x * x);
    values[i] = (twice_u < T(0) ? smaller : larger) + x * (larger * smaller) * inner;
  }
}

JAXMP_DISPATCH(Gelu, (float* values, int64_t count), (values, count), GeluBody(values, count))
JAXMP_DISPATCH(GeluSlope, (float* values, int64_t count), (values, count), GeluSlopeBody(values, count))

}  // namespace

void Gelu(float* values, int64_t count) { GeluBest(values, count); }
void Gelu(double* values, int64_t count) { GeluBody(values, count); }

void GeluSlope(float* values, int64_t count) { GeluSlopeBest(values, count); }
void GeluSlope(double* values, int64_t count) { GeluSlopeBody(values, count); }

}  // namespace jaxmp::hostmp
