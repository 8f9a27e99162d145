#include "csrc/hostmp/gemm/gemm_dispatch.h"

#include <algorithm>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/kernels/amx_gemm.h"
#include "csrc/hostmp/kernels/avx512_bf16_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

enum class Kernel16 { kWidened, kMkl, kAmx, kAvx512Bf16 };

// In the order of their rates (docs/benchmarks.md, docs/benchmarks-mkl.md). MKL's own 16-bit kernels need AMX: on Zen 4
// it widens bf16 and runs at the rate of sgemm, our AVX512_BF16 kernel at twice that.
Kernel16 kernel16_for(abi::cudaDataType_t type) {
  const bool is_bf16 = type == abi::CUDA_R_16BF;
  if ((is_bf16 ? cpu().amx_bf16 : cpu().amx_fp16) && mkl_has_gemm(type)) return Kernel16::kMkl;
  if (is_bf16 && cpu().amx_bf16) return Kernel16::kAmx;
  if (is_bf16 && cpu().avx512_bf16) return Kernel16::kAvx512Bf16;
  return Kernel16::kWidened;
}

std::string describe(Kernel16 kernel) {
  switch (kernel) {
    case Kernel16::kMkl:
      return "MKL, products of 16-bit numbers summed in f32";
    case Kernel16::kAmx:
      return "hostmp's AMX kernel, summed in f32";
    case Kernel16::kAvx512Bf16:
      return "hostmp's AVX512_BF16 kernel, summed in f32";
    case Kernel16::kWidened:
      break;
  }
  return "widened to f32, cblas_sgemm";
}

// Panels of k that are widened at a time: deep enough for sgemm's own blocking, small enough to stay in the cache.
constexpr int64_t kPanelDepth = 512;

// Widens `cols` stored columns of `rows` numbers into a dense panel.
template <typename T>
void widen_panel(const T* from, int64_t ld, int64_t rows, int64_t cols, float* to) {
  for (int64_t col = 0; col < cols; ++col) widen(from + col * ld, to + col * rows, rows);
}

template <typename T>
void gemm_widened(const Product& p, float alpha, float beta, char* scratch) {
  const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
  float* const panel_a = reinterpret_cast<float*>(scratch);
  float* const panel_b = panel_a + round_up(p.m * std::min(p.k, kPanelDepth), 16);
  const T* const a = static_cast<const T*>(p.a);
  const T* const b = static_cast<const T*>(p.b);
  for (int64_t at = 0; at < p.k; at += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, p.k - at);
    is_a_plain ? widen_panel(a + at * p.lda, p.lda, p.m, depth, panel_a)
               : widen_panel(a + at, p.lda, depth, p.m, panel_a);
    is_b_plain ? widen_panel(b + at, p.ldb, depth, p.n, panel_b)
               : widen_panel(b + at * p.ldb, p.ldb, p.n, depth, panel_b);
    gemm({p.trans_a, p.trans_b, p.m, p.n, depth, panel_a, is_a_plain ? p.m : depth, panel_b, is_b_plain ? depth : p.n,
          p.c, p.ldc},
         alpha, at == 0 ? beta : 1.0f);
  }
}

// As few calls as there may be: a part of which the kernel's instruction does not take the last k whole ends one.
void gemm_in_parts(void (*kernel)(const Parts&, float, float, char*), int64_t unit, const Parts& parts, float alpha,
                   float beta, char* scratch) {
  Parts together;
  for (const Product& part : parts) {
    together.push_back(part);
    if (part.k % unit == 0 && &part != &parts.back()) continue;
    kernel(together, alpha, beta, scratch);
    together.clear();
    beta = 1;
  }
}

enum class Kernel { kAmx, kAvx512Bf16, kOther };

Kernel kernel_for(abi::cudaDataType_t type) {
  if (type == abi::CUDA_R_16BF && cpu().amx_bf16) return Kernel::kAmx;
  if (type == abi::CUDA_R_16BF && cpu().avx512_bf16) return Kernel::kAvx512Bf16;
  return Kernel::kOther;
}

}  // namespace

BlasInfo blas_info() {
  if (!blas_is_loaded()) return {};
  const BlasLibraries libraries = blas_libraries();
  return {libraries.path,
          libraries.config,
          libraries.mkl,
          "cblas_sgemm, few rows in place",
          "cblas_dgemm, few rows in place",
          "cblas_cgemm",
          "cblas_zgemm",
          describe(kernel16_for(abi::CUDA_R_16BF)),
          describe(kernel16_for(abi::CUDA_R_16F))};
}

void gemm16(abi::cudaDataType_t type, const Parts& parts, float alpha, float beta, char* scratch) {
  const Kernel16 kernel = kernel16_for(type);
  if (kernel == Kernel16::kAmx) return gemm_in_parts(amx_gemm, kAmxUnit, parts, alpha, beta, scratch);
  if (kernel == Kernel16::kAvx512Bf16) return gemm_in_parts(bf16_gemm, kBf16Unit, parts, alpha, beta, scratch);
  for (const Product& p : parts) {
    if (kernel == Kernel16::kMkl) {
      mkl_gemm(type, p, alpha, beta);
    } else if (type == abi::CUDA_R_16BF) {
      gemm_widened<BFloat16>(p, alpha, beta, scratch);
    } else {
      gemm_widened<Float16>(p, alpha, beta, scratch);
    }
    beta = 1;
  }
}

int64_t gemm16_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  switch (kernel16_for(type)) {
    case Kernel16::kMkl:
      return 0;
    case Kernel16::kAmx:
      return amx_gemm_scratch(m, n, k);
    case Kernel16::kAvx512Bf16:
      return bf16_gemm_scratch(m, n, k);
    case Kernel16::kWidened:
      break;
  }
  const int64_t depth = std::min(k, kPanelDepth);
  return 4 * (round_up(m * depth, 16) + round_up(n * depth, 16));
}

void ordered_gemm(abi::cudaDataType_t type, const Parts& parts, bool adds, char* scratch) {
  const Kernel kernel = kernel_for(type);
  if (kernel == Kernel::kAmx) return amx_gemm(parts, 1.0f, adds ? 1.0f : 0.0f, scratch);
  if (kernel == Kernel::kAvx512Bf16) return bf16_gemm(parts, 1.0f, adds ? 1.0f : 0.0f, scratch);
  ordered_gemm_on("avx512", type, parts, adds, scratch) || ordered_gemm_on("avx2", type, parts, adds, scratch) ||
      ordered_gemm_on("portable", type, parts, adds, scratch);
}

int64_t ordered_gemm_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  const Kernel kernel = kernel_for(type);
  if (kernel == Kernel::kAmx) return amx_gemm_scratch(m, n, k);
  if (kernel == Kernel::kAvx512Bf16) return bf16_gemm_scratch(m, n, k);
  return ordered_gemm_on_scratch(type, m, n, k);
}

int64_t ordered_unit(abi::cudaDataType_t type) {
  const Kernel kernel = kernel_for(type);
  return kernel == Kernel::kAmx ? kAmxUnit : kernel == Kernel::kAvx512Bf16 ? kBf16Unit : 1;
}

int64_t ordered_panel(abi::cudaDataType_t type) { return kernel_for(type) == Kernel::kAmx ? kAmxPanel : kOrderedPanel; }

}  // namespace jaxmp::hostmp
