// Declarations that every file of kernels needs before its vectors. simd_gemm.cc picks one of the files, and has the
// portable kernels.
#pragma once

#include <complex>
#include <cstring>

#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/kernels/transpose_lines.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/float8.h"

namespace jaxmp::hostmp {

// The functions of simd_gemm.h, for one level.
struct SimdKernels {
  void (*gemm)(abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds, char* scratch);
  int64_t (*scratch_bytes)(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k);
  void (*small_n_gemm)(abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds);
  void (*add_columns)(abi::cudaDataType_t type, const Product& product);
};
extern const SimdKernels kNeonKernels, kAvx2Kernels, kAvx512Kernels;

// Packed at a time: two K blocks, so that C, which every packed block adds to, comes from memory half as often; and at
// most 768 KiB of op(A), for the L2 cache. kMC is a multiple of kMR for any instruction set and type.
constexpr int64_t kPackedK = 2 * kKC, kNC = 1024, kMC = 192;
constexpr int64_t kSmallNRows = 512;  // the sums of kSmallN columns stay in the L1 cache

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

}  // namespace jaxmp::hostmp
