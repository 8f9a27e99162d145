#include "csrc/hostmp/gemm/rounded_gemm.h"

#include <algorithm>
#include <cstring>

#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/stored_block.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLAS's own names, everywhere below

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
  RoundingKernel(const KernelChoice& choice, cublasComputeType_t compute, std::complex<double> alpha = 1,
                 bool adds = false)
      : choice{choice.kernel, choice.type},
        compute(compute),
        floats(facts(choice.type).is_complex ? 2 : 1),
        alpha(alpha),
        adds(adds) {}

  int64_t a_bytes(int64_t rows, int64_t depth) const { return rows * depth * facts(choice.type).bytes; }
  int64_t b_bytes(int64_t cols, int64_t depth) const { return cols * depth * facts(choice.type).bytes; }
  int64_t own_bytes(int64_t m, int64_t n, int64_t depth) const { return ScratchBytes(choice, m, n, depth); }
  void pack_a(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_a(block), to); }
  void pack_b(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_b(block), to); }
  void multiply(const KBlock<Product>& block, const Packed& packed, const CTile&) const {
    Multiply(choice, {product_of(block, packed)}, alpha, adds || block.first > 0, packed.own);
  }

  void pack(const StoredBlock& from, char* to) const {
    for (int64_t col = 0; col < from.cols; ++col) {
      round_run(compute, choice.type, static_cast<const float*>(from.data) + floats * (from.offset + col * from.ld),
                to + col * from.rows * facts(choice.type).bytes, floats * from.rows);
    }
  }

  KernelChoice choice;  // for the rounded numbers
  cublasComputeType_t compute;
  int64_t floats;  // of a number
  std::complex<double> alpha;
  bool adds;
};

}  // namespace

void rounded_gemm(const KernelChoice& choice, cublasComputeType_t compute, const KSegments& segments,
                  std::complex<double> alpha, bool adds, char* scratch) {
  for (const Product& p : segments) {
    blocked_gemm(RoundingKernel(choice, compute, alpha, adds || &p != segments.data()), &p, 1, scratch);
  }
}

int64_t rounded_gemm_scratch(const KernelChoice& choice, int64_t m, int64_t n, int64_t k) {
  return scratch_of(RoundingKernel(choice, CUBLAS_COMPUTE_32F), m, n, k).bytes();
}

}  // namespace jaxmp::hostmp
