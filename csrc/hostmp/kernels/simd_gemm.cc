#include "csrc/hostmp/kernels/simd_gemm.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/numeric/convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kWidth = 512;     // columns of op(B) packed at a time: at most 1 MiB, for the second cache
constexpr int64_t kStripRows = 48;  // a multiple of the rows of a strip, for any instruction set and type
constexpr int64_t kPanelRows = 8 * kStripRows;  // of op(A) packed at a time: at most 768 KiB, for the second cache
constexpr int64_t kThin = 16;                   // columns up to which A is read in place
constexpr int64_t kThinRows = 512;              // of which the sums of kThin columns stay in the first cache

int64_t rows_packed(int64_t m) { return std::min(round_up(m, kStripRows), kPanelRows); }

template <typename From>
constexpr int64_t kParts = 1;
template <typename T>
constexpr int64_t kParts<std::complex<T>> = 2;

template <typename From>
struct RealOf {
  using type = From;
};
template <>
struct RealOf<BFloat16> {
  using type = float;
};
template <>
struct RealOf<Float16> {
  using type = float;
};
template <typename T>
struct RealOf<std::complex<T>> {
  using type = T;
};
template <typename From>
using Real = typename RealOf<From>::type;

template <typename From, typename T>
void load_run(const From* from, T* to, int64_t count) {
  if constexpr (std::is_same_v<From, T>) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  } else {
    widen(from, to, count);
  }
}

// to[k * step + line] = from[line][k], of 4 lines.
template <typename T>
void transpose_lines(const T* const (&from)[4], int64_t length, int64_t step, T* to) {
  int64_t k = 0;
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, float>) {
    for (; k + 4 <= length; k += 4) {
      __m128 r[4];
      for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_ps(from[i] + k);
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + (k + i) * step, r[i]);
    }
  } else {
    for (; k + 2 <= length; k += 2) {
      for (int i = 0; i < 4; i += 2) {
        const __m128d x = _mm_loadu_pd(from[i] + k), y = _mm_loadu_pd(from[i + 1] + k);
        _mm_storeu_pd(to + k * step + i, _mm_unpacklo_pd(x, y));
        _mm_storeu_pd(to + (k + 1) * step + i, _mm_unpackhi_pd(x, y));
      }
    }
  }
#endif
  for (; k < length; ++k) {
    for (int i = 0; i < 4; ++i) to[k * step + i] = from[i][k];
  }
}

// What the body needs of an instruction set: vectors of kLanes numbers, and the register tile that its registers hold.

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
  JAXMP_SIMD V load(const float* from) { return _mm512_loadu_ps(from); }
  JAXMP_SIMD void store(float* to, V value) { _mm512_storeu_ps(to, value); }
  JAXMP_SIMD V broadcast(float value) { return _mm512_set1_ps(value); }
  JAXMP_SIMD V add(V x, V y) { return _mm512_add_ps(x, y); }
  JAXMP_SIMD V fma(V x, V y, V sum) { return _mm512_fmadd_ps(x, y, sum); }
  JAXMP_SIMD V fnma(V x, V y, V sum) { return _mm512_fnmadd_ps(x, y, sum); }
};
template <>
struct Simd<double> {
  using V = __m512d;
  static constexpr int kLanes = 8, kVectors = 3, kCols = 8, kComplexCols = 8;
  JAXMP_SIMD V load(const double* from) { return _mm512_loadu_pd(from); }
  JAXMP_SIMD void store(double* to, V value) { _mm512_storeu_pd(to, value); }
  JAXMP_SIMD V broadcast(double value) { return _mm512_set1_pd(value); }
  JAXMP_SIMD V add(V x, V y) { return _mm512_add_pd(x, y); }
  JAXMP_SIMD V fma(V x, V y, V sum) { return _mm512_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V fnma(V x, V y, V sum) { return _mm512_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace avx512

namespace avx2 {

#define JAXMP_TARGET __attribute__((target("avx2,fma")))

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = __m256;
  static constexpr int kLanes = 8, kVectors = 3, kCols = 4, kComplexCols = 4;
  JAXMP_SIMD V load(const float* from) { return _mm256_loadu_ps(from); }
  JAXMP_SIMD void store(float* to, V value) { _mm256_storeu_ps(to, value); }
  JAXMP_SIMD V broadcast(float value) { return _mm256_set1_ps(value); }
  JAXMP_SIMD V add(V x, V y) { return _mm256_add_ps(x, y); }
  JAXMP_SIMD V fma(V x, V y, V sum) { return _mm256_fmadd_ps(x, y, sum); }
  JAXMP_SIMD V fnma(V x, V y, V sum) { return _mm256_fnmadd_ps(x, y, sum); }
};
template <>
struct Simd<double> {
  using V = __m256d;
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4;
  JAXMP_SIMD V load(const double* from) { return _mm256_loadu_pd(from); }
  JAXMP_SIMD void store(double* to, V value) { _mm256_storeu_pd(to, value); }
  JAXMP_SIMD V broadcast(double value) { return _mm256_set1_pd(value); }
  JAXMP_SIMD V add(V x, V y) { return _mm256_add_pd(x, y); }
  JAXMP_SIMD V fma(V x, V y, V sum) { return _mm256_fmadd_pd(x, y, sum); }
  JAXMP_SIMD V fnma(V x, V y, V sum) { return _mm256_fnmadd_pd(x, y, sum); }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace avx2

#undef JAXMP_SIMD

#endif

namespace portable {

#define JAXMP_TARGET

template <typename T>
struct Simd {
  struct V {
    T lanes[4];
  };
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4;
  static V load(const T* from) {
    V value;
    std::memcpy(value.lanes, from, sizeof(value.lanes));
    return value;
  }
  static void store(T* to, V value) { std::memcpy(to, value.lanes, sizeof(value.lanes)); }
  static V broadcast(T value) { return {{value, value, value, value}}; }
  static V add(V x, V y) {
    for (int i = 0; i < kLanes; ++i) x.lanes[i] += y.lanes[i];
    return x;
  }
  static V fma(V x, V y, V sum) {
    for (int i = 0; i < kLanes; ++i) sum.lanes[i] += x.lanes[i] * y.lanes[i];
    return sum;
  }
  static V fnma(V x, V y, V sum) {
    for (int i = 0; i < kLanes; ++i) sum.lanes[i] -= x.lanes[i] * y.lanes[i];
    return sum;
  }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

}  // namespace portable

}  // namespace

bool is_thin(abi::cudaDataType_t type, const Product& p) {
  const bool is_real = type == abi::CUDA_R_32F || type == abi::CUDA_R_64F;
  return is_real && cpu().avx2 && p.n <= kThin && p.trans_a == abi::CUBLAS_OP_N;
}

void thin_gemm(abi::cudaDataType_t type, const Product& p, bool adds) {
#if defined(__x86_64__)
  if (cpu().avx512) return avx512::dispatch_thin(type, {p}, adds);
  if (cpu().avx2) return avx2::dispatch_thin(type, {p}, adds);
#endif
  portable::dispatch_thin(type, {p}, adds);
}

bool ordered_gemm_on(const char* instructions, abi::cudaDataType_t type, const Parts& parts, bool adds, char* scratch) {
  const std::string_view name = instructions;
#if defined(__x86_64__)
  if (name == "avx512" && cpu().avx512) return avx512::dispatch(type, parts, adds, scratch), true;
  if (name == "avx2" && cpu().avx2) return avx2::dispatch(type, parts, adds, scratch), true;
#endif
  if (name == "portable") return portable::dispatch(type, parts, adds, scratch), true;
  return false;
}

int64_t ordered_gemm_on_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMostCols = 8;
  const int64_t bytes = facts(accumulator_of(type)).bytes;  // of a complex number: both parts
  return bytes * (rows_packed(m) + round_up(std::min(n, kWidth), kMostCols)) * std::min(k, kOrderedPanel);
}

}  // namespace jaxmp::hostmp
