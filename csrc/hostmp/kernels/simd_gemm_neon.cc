#if defined(__aarch64__)

#include <arm_neon.h>

#include "csrc/hostmp/kernels/simd_kernels.h"

namespace jaxmp::hostmp {
namespace {

#define JAXMP_TARGET
#define JAXMP_SIMD static inline __attribute__((always_inline))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = float32x4_t;
  static constexpr int kLanes = 4, kVectors = 3, kCols = 8, kComplexCols = 8, kTransposed = 0;
  static constexpr bool kReadsBytes = true;
  JAXMP_SIMD V Load(const float* from) { return vld1q_f32(from); }
  JAXMP_SIMD V Load(const BFloat16* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16)); }
  JAXMP_SIMD V Load(const Float16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
  template <typename Byte>  // loads four bytes
  JAXMP_SIMD V Load(const Byte* from) {
    float numbers[kLanes];
    Widen(from, numbers, kLanes);
    return vld1q_f32(numbers);
  }
  JAXMP_SIMD void Store(float* to, V value) { vst1q_f32(to, value); }
  JAXMP_SIMD V Broadcast(float value) { return vdupq_n_f32(value); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return vfmaq_f32(sum, x, y); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return vfmsq_f32(sum, x, y); }
};
// Two registers, because packing writes multiples of four numbers.
template <>
struct Simd<double> {
  struct V {
    float64x2_t low, high;
    V operator+(V y) const { return {low + y.low, high + y.high}; }
    V operator*(V y) const { return {low * y.low, high * y.high}; }
  };
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  JAXMP_SIMD V Load(const double* from) { return {vld1q_f64(from), vld1q_f64(from + 2)}; }
  JAXMP_SIMD void Store(double* to, V value) {
    vst1q_f64(to, value.low);
    vst1q_f64(to + 2, value.high);
  }
  JAXMP_SIMD V Broadcast(double value) { return {vdupq_n_f64(value), vdupq_n_f64(value)}; }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return {vfmaq_f64(sum.low, x.low, y.low), vfmaq_f64(sum.high, x.high, y.high)}; }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return {vfmsq_f64(sum.low, x.low, y.low), vfmsq_f64(sum.high, x.high, y.high)}; }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace

const SimdKernels kNeonKernels = kKernels;

}  // namespace jaxmp::hostmp

#endif
