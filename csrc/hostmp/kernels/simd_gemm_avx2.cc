#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/simd_kernels.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

#define JAXMP_TARGET __attribute__((target("avx2,fma,f16c")))
#define JAXMP_SIMD JAXMP_TARGET static inline __attribute__((always_inline))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = __m256;
  static constexpr int kLanes = 8, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  static constexpr bool kReadsBytes = true;
  JAXMP_SIMD V Load(const float* from) { return _mm256_loadu_ps(from); }
  JAXMP_SIMD V Load(const BFloat16* from) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
  }
  JAXMP_SIMD V Load(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  JAXMP_SIMD V Load(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  JAXMP_SIMD V Load(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  JAXMP_SIMD V Load(const Float8E4m3* from) { return Widen8(from); }
  JAXMP_SIMD V Load(const Float8E5m2* from) { return Widen8(from); }
  JAXMP_SIMD void Store(float* to, V value) { _mm256_storeu_ps(to, value); }
  JAXMP_SIMD V Broadcast(float value) { return _mm256_set1_ps(value); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm256_fmadd_ps(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm256_fnmadd_ps(x, y, sum); }
};
template <>
struct Simd<double> {
  using V = __m256d;
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  JAXMP_SIMD V Load(const double* from) { return _mm256_loadu_pd(from); }
  JAXMP_SIMD void Store(double* to, V value) { _mm256_storeu_pd(to, value); }
  JAXMP_SIMD V Broadcast(double value) { return _mm256_set1_pd(value); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm256_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm256_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace

const SimdKernels kAvx2Kernels = kKernels;

}  // namespace jaxmp::hostmp

#endif
