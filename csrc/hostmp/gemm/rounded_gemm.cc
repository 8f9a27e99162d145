#include "csrc/hostmp/gemm/rounded_gemm.h"

#include <algorithm>
#include <cstring>

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/stored_block.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLAS's own names, everywhere below

// Real operands become 16-bit numbers, for the 16-bit kernels; all else stays f32.
cudaDataType_t rounded_type(cublasComputeType_t compute, cudaDataType_t type) {
  if (facts(type).is_complex || compute == CUBLAS_COMPUTE_32F_FAST_TF32) return type;
  return compute == CUBLAS_COMPUTE_32F_FAST_16BF ? CUDA_R_16BF : CUDA_R_16F;
}

template <typename T>
void round_through(const float* from, float* to, int64_t count) {
  constexpr int64_t kRun = 256;
  T rounded[kRun];
  for (int64_t i = 0; i < count; i += kRun) {
    const int64_t size = std::min(kRun, count - i);
    downconvert(from + i, rounded, size);
    widen(rounded, to + i, size);
  }
}

void round_run(cublasComputeType_t compute, cudaDataType_t rounded, const float* from, char* to, int64_t count) {
  if (rounded == CUDA_R_16BF) return downconvert(from, reinterpret_cast<BFloat16*>(to), count);
  if (rounded == CUDA_R_16F) return downconvert(from, reinterpret_cast<Float16*>(to), count);
  float* const wide = reinterpret_cast<float*>(to);
  if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) return round_to_tf32(from, wide, count);
  compute == CUBLAS_COMPUTE_32F_FAST_16BF ? round_through<BFloat16>(from, wide, count)
                                          : round_through<Float16>(from, wide, count);
}

// Rounds K blocks of both operands.
struct RoundingKernel : StoredBlocks {
  RoundingKernel(cublasComputeType_t compute, cudaDataType_t type, std::complex<float> alpha = 1, float beta = 0)
      : compute(compute),
        type(type),
        rounded(rounded_type(compute, type)),
        floats(facts(type).is_complex ? 2 : 1),
        alpha(alpha),
        beta(beta) {}

  int64_t a_bytes(int64_t rows, int64_t depth) const { return rows * depth * facts(rounded).bytes; }
  int64_t b_bytes(int64_t cols, int64_t depth) const { return cols * depth * facts(rounded).bytes; }
  int64_t own_bytes(int64_t m, int64_t n, int64_t depth) const {
    return facts(rounded).is_16bit ? gemm16_scratch(rounded, m, n, depth) : 0;
  }
  void pack_a(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_a(block), to); }
  void pack_b(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_b(block), to); }
  void multiply(const KBlock<Product>& block, const Packed& packed, const CTile&) const {
    const Product p = product_of(block, packed);
    const float add = block.first == 0 ? beta : 1.0f;
    if (facts(rounded).is_16bit) return gemm16(rounded, {p}, alpha.real(), add, packed.own);
    if (facts(type).is_complex) return gemm(p, Complex64(alpha), Complex64(add));
    gemm(p, alpha.real(), add);
  }

  void pack(const StoredBlock& from, char* to) const {
    for (int64_t col = 0; col < from.cols; ++col) {
      round_run(compute, rounded, static_cast<const float*>(from.data) + floats * (from.offset + col * from.ld),
                to + col * from.rows * facts(rounded).bytes, floats * from.rows);
    }
  }

  cublasComputeType_t compute;
  cudaDataType_t type, rounded;
  int64_t floats;  // of a number
  std::complex<float> alpha;
  float beta;
};

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

void rounded_gemm(cublasComputeType_t compute, cudaDataType_t type, const Product& p, std::complex<float> alpha,
                  float beta, char* scratch) {
  blocked_gemm(RoundingKernel(compute, type, alpha, beta), &p, 1, scratch);
}

int64_t rounded_gemm_scratch(cublasComputeType_t compute, cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  return scratch_of(RoundingKernel(compute, type), m, n, k).bytes();
}

}  // namespace jaxmp::hostmp
