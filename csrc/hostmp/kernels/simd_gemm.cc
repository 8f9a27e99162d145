#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/kernels/simd_kernels.h"

namespace jaxmp::hostmp {
namespace {

#define JAXMP_TARGET
#define JAXMP_SIMD static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // every function that returns a vector is inlined

template <typename T>
struct Simd {
  using V __attribute__((vector_size(4 * sizeof(T)))) = T;
  static constexpr int kLanes = 4, kVectors = 3, kCols = 4, kComplexCols = 4, kTransposed = 0;
  static constexpr bool kReadsBytes = false;  // bytes are decoded before (kernel_choice.cc)
  template <typename From>
  JAXMP_SIMD V Load(const From* from) {
    V value;
    if constexpr (std::is_same_v<From, T>) {
      std::memcpy(&value, from, sizeof(value));
    } else {
      T numbers[kLanes];
      Widen(from, numbers, kLanes);
      std::memcpy(&value, numbers, sizeof(value));
    }
    return value;
  }
  JAXMP_SIMD void Store(T* to, const V& value) { std::memcpy(to, &value, sizeof(value)); }
  JAXMP_SIMD V Broadcast(T value) { return V{value, value, value, value}; }
  JAXMP_SIMD V Fma(const V& x, const V& y, const V& sum) { return sum + x * y; }
  JAXMP_SIMD V Fnma(const V& x, const V& y, const V& sum) { return sum - x * y; }
};

#include "csrc/hostmp/kernels/simd_gemm_impl.h"

const SimdKernels& KernelsOf([[maybe_unused]] SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) return kAvx512Kernels;
  if (level == SimdLevel::kAvx2) return kAvx2Kernels;
#elif defined(__aarch64__)
  if (level == SimdLevel::kNeon) return kNeonKernels;
#endif
  return kKernels;  // portable
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
  KernelsOf(level).gemm(type, segments, alpha, adds, scratch);
}

int64_t SimdGemmScratch(SimdLevel level, abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  return KernelsOf(level).scratch_bytes(type, m, n, k);
}

void SimdSmallNGemm(SimdLevel level, abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds) {
  KernelsOf(level).small_n_gemm(type, segments, alpha, adds);
}

void SimdAddColumns(SimdLevel level, abi::cudaDataType_t type, const Product& product) {
  KernelsOf(level).add_columns(type, product);
}

}  // namespace jaxmp::hostmp
