#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/simd_kernels.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

#define JAXMP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define JAXMP_SIMD JAXMP_TARGET static inline __attribute__((always_inline))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = __m512;
  static constexpr int kLanes = 16, kVectors = 3, kCols = 8, kComplexCols = 8;
  static constexpr bool kReadsBytes = true;
  JAXMP_SIMD V Load(const float* from) { return _mm512_loadu_ps(from); }
  JAXMP_SIMD V Load(const BFloat16* from) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
  }
  JAXMP_SIMD V Load(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  JAXMP_SIMD V Load(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  JAXMP_SIMD V Load(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  JAXMP_SIMD V Load(const Float8E4m3* from) { return Widen16(from); }
  JAXMP_SIMD V Load(const Float8E5m2* from) { return Widen16(from); }
  JAXMP_SIMD void Store(float* to, V value) { _mm512_storeu_ps(to, value); }
  JAXMP_SIMD V Broadcast(float value) { return _mm512_set1_ps(value); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm512_fmadd_ps(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm512_fnmadd_ps(x, y, sum); }

  static constexpr int kTransposed = 16;
  JAXMP_SIMD void Transpose(const float* const* from, int64_t step, float* to) {
    // Within each quarter q of a register: parts[half][j] has k = 4 q + j of four lines.
    __m512d parts[2][4];
    for (int half = 0; half < 2; ++half) {
      __m512 lines[4];
      for (int i = 0; i < 4; ++i) lines[i] = _mm512_loadu_ps(from[4 * half + i]);
      const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(lines[0], lines[1]));
      const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(lines[2], lines[3]));
      const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(lines[0], lines[1]));
      const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(lines[2], lines[3]));
      parts[half][0] = _mm512_unpacklo_pd(low01, low23);
      parts[half][1] = _mm512_unpackhi_pd(low01, low23);
      parts[half][2] = _mm512_unpacklo_pd(high01, high23);
      parts[half][3] = _mm512_unpackhi_pd(high01, high23);
    }
    const __m512i quarters[2] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                                 _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
    for (int j = 0; j < 4; ++j) {
      for (int q = 0; q < 4; q += 2) {
        const __m512d two = _mm512_permutex2var_pd(parts[0][j], quarters[q / 2], parts[1][j]);
        float* const line = to + (4 * q + j) * step;
        _mm256_storeu_ps(line, _mm256_castpd_ps(_mm512_castpd512_pd256(two)));
        _mm256_storeu_ps(line + 4 * step, _mm256_castpd_ps(_mm512_extractf64x4_pd(two, 1)));
      }
    }
  }
};
template <>
struct Simd<double> {
  using V = __m512d;
  static constexpr int kLanes = 8, kVectors = 3, kCols = 8, kComplexCols = 8, kTransposed = 0;
  JAXMP_SIMD V Load(const double* from) { return _mm512_loadu_pd(from); }
  JAXMP_SIMD void Store(double* to, V value) { _mm512_storeu_pd(to, value); }
  JAXMP_SIMD V Broadcast(double value) { return _mm512_set1_pd(value); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm512_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm512_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace

const SimdKernels kAvx512Kernels = kKernels;

}  // namespace jaxmp::hostmp

#endif
