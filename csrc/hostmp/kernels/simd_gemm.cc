#include "csrc/hostmp/kernels/simd_gemm.h"

#include <complex>
#include <cstring>

#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/transpose_lines.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/float8.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxmp::hostmp {
namespace {

// What is packed at a time. Two K blocks, so that C, which each of them adds to, comes from memory half as often. Of
// op(A) at most 768 KiB, for the second cache; kMC is a multiple of kMR for any instruction set and type.
constexpr int64_t kPackedK = 2 * kKC, kNC = 1024, kMC = 192;
constexpr int64_t kSmallNRows = 512;  // the sums of kSmallN columns stay in the first cache

template <typename From>
constexpr int64_t kParts = 1;
template <typename T>
constexpr int64_t kParts<std::complex<T>> = 2;

template <typename From>
struct RealOf {
  using type = Computed<From>;
};
template <typename T>
struct RealOf<std::complex<T>> {
  using type = T;
};
template <typename From>
using Real = typename RealOf<From>::type;

// What the body needs of an instruction set: vectors of kLanes numbers, loaded from such numbers or narrower ones, the
// register tile that its registers hold, and perhaps a Transpose() of kTransposed k of 8 lines: to[k * step + line] is
// from[line][k].

#if defined(__x86_64__)

namespace avx512 {

#define JAXMP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define JAXMP_SIMD JAXMP_TARGET static inline __attribute__((always_inline))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = __m512;
  static constexpr int kLanes = 16, kVectors = 3, kCols = 8, kComplexCols = 8;
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
  JAXMP_SIMD V Add(V x, V y) { return _mm512_add_ps(x, y); }
  JAXMP_SIMD V Mul(V x, V y) { return _mm512_mul_ps(x, y); }
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
  JAXMP_SIMD V Add(V x, V y) { return _mm512_add_pd(x, y); }
  JAXMP_SIMD V Mul(V x, V y) { return _mm512_mul_pd(x, y); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm512_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm512_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace avx512

namespace avx2 {

#define JAXMP_TARGET __attribute__((target("avx2,fma,f16c")))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = __m256;
  static constexpr int kLanes = 8, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
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
  JAXMP_SIMD V Add(V x, V y) { return _mm256_add_ps(x, y); }
  JAXMP_SIMD V Mul(V x, V y) { return _mm256_mul_ps(x, y); }
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
  JAXMP_SIMD V Add(V x, V y) { return _mm256_add_pd(x, y); }
  JAXMP_SIMD V Mul(V x, V y) { return _mm256_mul_pd(x, y); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return _mm256_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return _mm256_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace avx2

#undef JAXMP_SIMD

#elif defined(__aarch64__)

namespace neon {

#define JAXMP_TARGET
#define JAXMP_SIMD static inline __attribute__((always_inline))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = float32x4_t;
  static constexpr int kLanes = 4, kVectors = 3, kCols = 8, kComplexCols = 8, kTransposed = 0;
  JAXMP_SIMD V Load(const float* from) { return vld1q_f32(from); }
  JAXMP_SIMD V Load(const BFloat16* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16)); }
  JAXMP_SIMD V Load(const Float16* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
  template <typename Byte>  // four of them
  JAXMP_SIMD V Load(const Byte* from) {
    float numbers[kLanes];
    Widen(from, numbers, kLanes);
    return vld1q_f32(numbers);
  }
  JAXMP_SIMD void Store(float* to, V value) { vst1q_f32(to, value); }
  JAXMP_SIMD V Broadcast(float value) { return vdupq_n_f32(value); }
  JAXMP_SIMD V Add(V x, V y) { return vaddq_f32(x, y); }
  JAXMP_SIMD V Mul(V x, V y) { return vmulq_f32(x, y); }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return vfmaq_f32(sum, x, y); }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return vfmsq_f32(sum, x, y); }
};
// Two registers, because packing writes multiples of four numbers.
template <>
struct Simd<double> {
  struct V {
    float64x2_t low, high;
  };
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  JAXMP_SIMD V Load(const double* from) { return {vld1q_f64(from), vld1q_f64(from + 2)}; }
  JAXMP_SIMD void Store(double* to, V value) {
    vst1q_f64(to, value.low);
    vst1q_f64(to + 2, value.high);
  }
  JAXMP_SIMD V Broadcast(double value) { return {vdupq_n_f64(value), vdupq_n_f64(value)}; }
  JAXMP_SIMD V Add(V x, V y) { return {vaddq_f64(x.low, y.low), vaddq_f64(x.high, y.high)}; }
  JAXMP_SIMD V Mul(V x, V y) { return {vmulq_f64(x.low, y.low), vmulq_f64(x.high, y.high)}; }
  JAXMP_SIMD V Fma(V x, V y, V sum) { return {vfmaq_f64(sum.low, x.low, y.low), vfmaq_f64(sum.high, x.high, y.high)}; }
  JAXMP_SIMD V Fnma(V x, V y, V sum) { return {vfmsq_f64(sum.low, x.low, y.low), vfmsq_f64(sum.high, x.high, y.high)}; }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace neon

#undef JAXMP_SIMD

#endif

namespace portable {

#define JAXMP_TARGET

template <typename T>
struct Simd {
  struct V {
    T lanes[4];
  };
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  static V Load(const T* from) {
    V value;
    std::memcpy(value.lanes, from, sizeof(value.lanes));
    return value;
  }
  template <typename From>
  static V Load(const From* from) {
    V value;
    Widen(from, value.lanes, kLanes);
    return value;
  }
  static void Store(T* to, V value) { std::memcpy(to, value.lanes, sizeof(value.lanes)); }
  static V Broadcast(T value) { return {{value, value, value, value}}; }
  static V Add(V x, V y) {
    for (int i = 0; i < kLanes; ++i) x.lanes[i] += y.lanes[i];
    return x;
  }
  static V Mul(V x, V y) {
    for (int i = 0; i < kLanes; ++i) x.lanes[i] *= y.lanes[i];
    return x;
  }
  static V Fma(V x, V y, V sum) {
    for (int i = 0; i < kLanes; ++i) sum.lanes[i] += x.lanes[i] * y.lanes[i];
    return sum;
  }
  static V Fnma(V x, V y, V sum) {
    for (int i = 0; i < kLanes; ++i) sum.lanes[i] -= x.lanes[i] * y.lanes[i];
    return sum;
  }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace portable

// f(isa) with the functions of an instruction set.
template <typename Function>
auto WithLevel([[maybe_unused]] SimdLevel level, Function function) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return function(avx512::Isa{});
  if (level == SimdLevel::kAvx2) return function(avx2::Isa{});
#elif defined(__aarch64__)
  if (level == SimdLevel::kNeon) return function(neon::Isa{});
#endif
  return function(portable::Isa{});
}

}  // namespace

bool Has(SimdLevel level) {
  constexpr bool Cpu::* kFeatures[] = {nullptr, &Cpu::neon, &Cpu::avx2, &Cpu::avx512};  // by SimdLevel
  return level == SimdLevel::kPortable || cpu().*kFeatures[static_cast<size_t>(level)];
}

SimdLevel simd_level() {
  for (SimdLevel level : {SimdLevel::kAvx512, SimdLevel::kAvx2, SimdLevel::kNeon}) {
    if (Has(level)) return level;
  }
  return SimdLevel::kPortable;
}

void SimdGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds,
              char* scratch) {
  WithLevel(level, [&](auto isa) {
    WithType(type, [&](auto number) { isa.template Gemm<decltype(number)>(segments, alpha, adds, scratch); });
  });
}

void SimdSmallNGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds) {
  WithLevel(level, [&](auto isa) {
    WithType(type, [&](auto number) {
      if constexpr (kParts<decltype(number)> == 1) isa.template SmallNGemm<decltype(number)>(segments, alpha, adds);
    });
  });
}

void SimdAddColumns(SimdLevel level, abi::cudaDataType_t type, const Product& product) {
  WithLevel(level, [&](auto isa) {
    const auto add = [&](auto number) { isa.template AddColumnsToC<decltype(number)>(product); };
    switch (type) {
      case abi::CUDA_R_8I:
        return add(int8_t{});
      case abi::CUDA_R_8U:
        return add(uint8_t{});
      case abi::CUDA_R_8F_E4M3:
        return add(Float8E4m3{});
      case abi::CUDA_R_8F_E5M2:
        return add(Float8E5m2{});
      default:
        return add(float{});
    }
  });
}

int64_t SimdGemmScratch(SimdLevel level, abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  int64_t bytes = 0;
  WithLevel(level, [&](auto isa) {
    WithType(type, [&](auto number) { bytes = isa.template ScratchBytes<decltype(number)>(m, n, k); });
  });
  return bytes;
}

}  // namespace jaxmp::hostmp
