#include "csrc/hostmp/gemm/rounded_gemm.h"

#include <algorithm>
#include <cstring>

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLAS's own names, everywhere below

// Panels of k that are rounded at a time: deep enough for the BLAS's own blocking, small enough to stay in the cache.
constexpr int64_t kPanelDepth = 512;
constexpr int64_t kPanelAlignment = 64;

// Real operands become 16-bit numbers, for the 16-bit kernels; all else stays f32.
cudaDataType_t panel_type(cublasComputeType_t compute, cudaDataType_t type) {
  if (facts(type).is_complex || compute == CUBLAS_COMPUTE_32F_FAST_TF32) return type;
  return compute == CUBLAS_COMPUTE_32F_FAST_16BF ? CUDA_R_16BF : CUDA_R_16F;
}

template <typename T>
void round_through(const float* from, float* to, int64_t count) {
  constexpr int64_t kChunk = 256;
  T narrowed[kChunk];
  for (int64_t i = 0; i < count; i += kChunk) {
    const int64_t size = std::min(kChunk, count - i);
    narrow(from + i, narrowed, size);
    widen(narrowed, to + i, size);
  }
}

void round_run(cublasComputeType_t compute, cudaDataType_t panel, const float* from, char* to, int64_t count) {
  if (panel == CUDA_R_16BF) return narrow(from, reinterpret_cast<BFloat16*>(to), count);
  if (panel == CUDA_R_16F) return narrow(from, reinterpret_cast<Float16*>(to), count);
  float* const wide = reinterpret_cast<float*>(to);
  if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) return round_to_tf32(from, wide, count);
  compute == CUBLAS_COMPUTE_32F_FAST_16BF ? round_through<BFloat16>(from, wide, count)
                                          : round_through<Float16>(from, wide, count);
}

struct Sizes {
  int64_t a, b, inner;
};
Sizes sizes_of(cublasComputeType_t compute, cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  const cudaDataType_t panel = panel_type(compute, type);
  const int64_t depth = std::min(k, kPanelDepth);
  const int64_t inner = facts(panel).is_16bit ? gemm16_scratch(panel, m, n, depth) : 0;
  return {round_up(m * depth * facts(panel).bytes, kPanelAlignment),
          round_up(n * depth * facts(panel).bytes, kPanelAlignment), inner};
}

}  // namespace

bool rounds_operands(cublasComputeType_t compute) {
  return compute == CUBLAS_COMPUTE_32F_FAST_TF32 || compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
         compute == CUBLAS_COMPUTE_32F_FAST_16F;
}

void round_to_tf32(const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    // Just under half of the last bit that is kept, and that bit itself, which decides a tie; infinities and NaN stay.
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    bits = is_finite ? (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000 : bits;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

void gemm_rounded(cublasComputeType_t compute, cudaDataType_t type, const Product& p, std::complex<float> alpha,
                  float beta, char* scratch) {
  const bool is_a_plain = p.trans_a == CUBLAS_OP_N, is_b_plain = p.trans_b == CUBLAS_OP_N;
  const cudaDataType_t panel = panel_type(compute, type);
  const int64_t floats = facts(type).is_complex ? 2 : 1, bytes = facts(panel).bytes;
  const Sizes sizes = sizes_of(compute, type, p.m, p.n, p.k);
  char* const panel_a = scratch;
  char* const panel_b = panel_a + sizes.a;
  char* const inner = panel_b + sizes.b;
  // Rounds `cols` stored columns of `rows` numbers into a dense panel.
  const auto fill = [&](const void* data, int64_t ld, int64_t row, int64_t col, int64_t rows, int64_t cols, char* to) {
    const float* const from = static_cast<const float*>(data);
    for (int64_t j = 0; j < cols; ++j) {
      round_run(compute, panel, from + floats * ((col + j) * ld + row), to + j * rows * bytes, floats * rows);
    }
  };
  for (int64_t at = 0; at < p.k; at += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, p.k - at);
    is_a_plain ? fill(p.a, p.lda, 0, at, p.m, depth, panel_a) : fill(p.a, p.lda, at, 0, depth, p.m, panel_a);
    is_b_plain ? fill(p.b, p.ldb, at, 0, depth, p.n, panel_b) : fill(p.b, p.ldb, 0, at, p.n, depth, panel_b);
    const Product part = {
        p.trans_a, p.trans_b, p.m, p.n, depth, panel_a, is_a_plain ? p.m : depth, panel_b, is_b_plain ? depth : p.n,
        p.c,       p.ldc};
    const float add = at == 0 ? beta : 1.0f;
    if (facts(panel).is_16bit) {
      gemm16(panel, {part}, alpha.real(), add, inner);
    } else if (facts(type).is_complex) {
      gemm(part, Complex64(alpha), Complex64(add));
    } else {
      gemm(part, alpha.real(), add);
    }
  }
}

int64_t gemm_rounded_scratch(cublasComputeType_t compute, cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  const Sizes sizes = sizes_of(compute, type, m, n, k);
  return sizes.a + sizes.b + sizes.inner;
}

}  // namespace jaxmp::hostmp
