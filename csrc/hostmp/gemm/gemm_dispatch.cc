#include "csrc/hostmp/gemm/gemm_dispatch.h"

#include <algorithm>

#include "csrc/base/str_cat.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/stored_block.h"
#include "csrc/hostmp/kernels/amx_gemm.h"
#include "csrc/hostmp/kernels/avx512_bf16_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

enum class Kernel { kOther, kMkl, kAmx, kAvx512Bf16 };

// Our own.
Kernel bf16_kernel_for(abi::cudaDataType_t type) {
  if (type == abi::CUDA_R_16BF && cpu().amx_bf16) return Kernel::kAmx;
  if (type == abi::CUDA_R_16BF && cpu().avx512_bf16) return Kernel::kAvx512Bf16;
  return Kernel::kOther;
}

// In the order of their rates (docs/benchmarks.md, docs/benchmarks-mkl.md). MKL's own 16-bit kernels need AMX: on Zen 4
// it widens bf16 and runs at the rate of sgemm, our AVX512_BF16 kernel at twice that (on Intel: features.cc).
Kernel gemm16_kernel_for(abi::cudaDataType_t type) {
  const bool has_amx = type == abi::CUDA_R_16BF ? cpu().amx_bf16 : cpu().amx_fp16;
  return has_amx && mkl_has_gemm(type) ? Kernel::kMkl : bf16_kernel_for(type);
}

const char* describe_f32() {
  const bool is_own = simd_level() == SimdLevel::kAvx512 && blas_is_openblas();
  return is_own ? "AVX-512 kernel of hostmp" : "cblas_sgemm, hostmp for few rows";
}

std::string describe(Kernel kernel) {
  switch (kernel) {
    case Kernel::kMkl:
      return "MKL, products of 16-bit numbers summed in f32";
    case Kernel::kAmx:
      return "AMX kernel of hostmp, summed in f32";
    case Kernel::kAvx512Bf16:
      return "AVX512_BF16 kernel of hostmp, summed in f32";
    case Kernel::kOther:
      break;
  }
  return text("widened to f32, ", describe_f32());
}

// Up to which our kernel for f32 and AVX-512 is faster than any BLAS that was measured.
constexpr int64_t kFewColumns = 256;

// Widens K blocks of both operands for sgemm.
template <typename T>
struct WideningKernel : StoredBlocks {
  int64_t a_bytes(int64_t rows, int64_t depth) const { return 4 * rows * depth; }
  int64_t b_bytes(int64_t cols, int64_t depth) const { return 4 * cols * depth; }
  int64_t own_bytes(int64_t, int64_t, int64_t) const { return 0; }
  void pack_a(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_a(block), to); }
  void pack_b(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_b(block), to); }
  void multiply(const KBlock<Product>& block, const Packed& packed, const CTile&) const {
    gemm(product_of(block, packed), alpha, block.first == 0 ? beta : 1.0f);
  }

  static void pack(const StoredBlock& from, char* to) {
    float* const wide = reinterpret_cast<float*>(to);
    for (int64_t col = 0; col < from.cols; ++col) {
      widen(static_cast<const T*>(from.data) + from.offset + col * from.ld, wide + col * from.rows, from.rows);
    }
  }

  float alpha, beta;
};

template <typename T>
void widening_gemm(const Product& p, float alpha, float beta, char* scratch) {
  WideningKernel<T> kernel;
  kernel.alpha = alpha;
  kernel.beta = beta;
  blocked_gemm(kernel, &p, 1, scratch);
}

// Batches K segments: one that is no multiple of the kernel's k unit must end its batch.
void gemm_in_batches(void (*kernel)(const KSegments&, float, float, char*), int64_t unit, const KSegments& segments,
                     float alpha, float beta, char* scratch) {
  KSegments batch;
  for (const Product& segment : segments) {
    batch.push_back(segment);
    if (segment.k % unit == 0 && &segment != &segments.back()) continue;
    kernel(batch, alpha, beta, scratch);
    batch.clear();
    beta = 1;
  }
}

}  // namespace

bool takes_simd_gemm(abi::cudaDataType_t type, abi::cublasOperation_t trans_a, int64_t n) {
  if (n <= kSmallN && trans_a == abi::CUBLAS_OP_N && simd_level() != SimdLevel::kPortable) return true;
  if (type == abi::CUDA_R_64F || simd_level() != SimdLevel::kAvx512) return false;
  return n <= kFewColumns || blas_is_openblas();
}

void gemm16(abi::cudaDataType_t type, const KSegments& segments, float alpha, float beta, char* scratch) {
  const Kernel kernel = gemm16_kernel_for(type);
  if (kernel == Kernel::kAmx) return gemm_in_batches(amx_gemm, kAmxUnit, segments, alpha, beta, scratch);
  if (kernel == Kernel::kAvx512Bf16) {
    return gemm_in_batches(avx512_bf16_gemm, kBf16Unit, segments, alpha, beta, scratch);
  }
  const bool only_adds = beta == 0 || beta == 1;
  if (kernel == Kernel::kOther && only_adds && takes_simd_gemm(type, segments.front().trans_a, segments.front().n)) {
    return simd_gemm(simd_level(), type, segments, static_cast<double>(alpha), beta == 1, scratch);
  }
  for (const Product& p : segments) {
    if (kernel == Kernel::kMkl) {
      mkl_gemm(type, p, alpha, beta);
    } else if (type == abi::CUDA_R_16BF) {
      widening_gemm<BFloat16>(p, alpha, beta, scratch);
    } else {
      widening_gemm<Float16>(p, alpha, beta, scratch);
    }
    beta = 1;
  }
}

int64_t gemm16_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  switch (gemm16_kernel_for(type)) {
    case Kernel::kMkl:
      return 0;
    case Kernel::kAmx:
      return amx_gemm_scratch(m, n, k);
    case Kernel::kAvx512Bf16:
      return avx512_bf16_gemm_scratch(m, n, k);
    case Kernel::kOther:
      break;
  }
  return std::max(scratch_of(WideningKernel<Float16>{}, m, n, k).bytes(),
                  simd_gemm_scratch(simd_level(), type, m, n, k));
}

void fixed_order_gemm(abi::cudaDataType_t type, const KSegments& segments, bool adds, char* scratch) {
  const Kernel kernel = bf16_kernel_for(type);
  if (kernel == Kernel::kAmx) return amx_gemm(segments, 1.0f, adds ? 1.0f : 0.0f, scratch);
  if (kernel == Kernel::kAvx512Bf16) return avx512_bf16_gemm(segments, 1.0f, adds ? 1.0f : 0.0f, scratch);
  simd_gemm(simd_level(), type, segments, 1.0, adds, scratch);
}

int64_t fixed_order_gemm_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  const Kernel kernel = bf16_kernel_for(type);
  if (kernel == Kernel::kAmx) return amx_gemm_scratch(m, n, k);
  if (kernel == Kernel::kAvx512Bf16) return avx512_bf16_gemm_scratch(m, n, k);
  return simd_gemm_scratch(simd_level(), type, m, n, k);
}

int64_t k_unit(abi::cudaDataType_t type) {
  const Kernel kernel = bf16_kernel_for(type);
  return kernel == Kernel::kAmx ? kAmxUnit : kernel == Kernel::kAvx512Bf16 ? kBf16Unit : 1;
}

int64_t k_block_depth(abi::cudaDataType_t type) { return bf16_kernel_for(type) == Kernel::kAmx ? kAmxKC : kKC; }

bool has_bf16_kernel() { return bf16_kernel_for(abi::CUDA_R_16BF) != Kernel::kOther; }

BlasInfo blas_info() {
  if (!blas_is_loaded()) return {};
  const BlasLibraries libraries = blas_libraries();
  return {libraries.path,
          libraries.config,
          libraries.mkl,
          describe_f32(),
          "cblas_dgemm, hostmp for few rows",
          "cblas_cgemm",
          "cblas_zgemm",
          describe(gemm16_kernel_for(abi::CUDA_R_16BF)),
          describe(gemm16_kernel_for(abi::CUDA_R_16F))};
}

}  // namespace jaxmp::hostmp
