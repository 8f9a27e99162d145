#include "csrc/hostmp/gemm/gemm_dispatch.h"

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/stored_block.h"
#include "csrc/hostmp/kernels/amx_gemm.h"
#include "csrc/hostmp/kernels/avx512_bf16_gemm.h"
#include "csrc/hostmp/kernels/bf16_small_n.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

// Widens K blocks of both operands for sgemm.
struct WideningKernel : StoredBlocks {
  int64_t a_bytes(int64_t rows, int64_t depth) const { return 4 * rows * depth; }
  int64_t b_bytes(int64_t cols, int64_t depth) const { return 4 * cols * depth; }
  int64_t own_bytes(int64_t, int64_t, int64_t) const { return 0; }
  void pack_a(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_a(block), to); }
  void pack_b(const KBlock<Product>& block, int64_t, int64_t, char* to) const { pack(stored_b(block), to); }
  void multiply(const KBlock<Product>& block, const Packed& packed, const CTile&) const {
    gemm(product_of(block, packed), alpha, adds || block.first > 0 ? 1.0f : 0.0f);
  }

  void pack(const StoredBlock& from, char* to) const {
    type == abi::CUDA_R_16BF ? pack_as<BFloat16>(from, to) : pack_as<Float16>(from, to);
  }
  template <typename T>
  static void pack_as(const StoredBlock& from, char* to) {
    float* const wide = reinterpret_cast<float*>(to);
    for (int64_t col = 0; col < from.cols; ++col) {
      widen(static_cast<const T*>(from.data) + from.offset + col * from.ld, wide + col * from.rows, from.rows);
    }
  }

  explicit WideningKernel(abi::cudaDataType_t type, float alpha = 1, bool adds = false)
      : type(type), alpha(alpha), adds(adds) {}
  abi::cudaDataType_t type;
  float alpha;
  bool adds;
};

void BlasGemm(abi::cudaDataType_t type, const Product& p, std::complex<double> alpha, bool adds) {
  const double one = adds ? 1 : 0;
  switch (type) {
    case abi::CUDA_R_64F:
      return gemm(p, alpha.real(), one);
    case abi::CUDA_C_32F:
      return gemm(p, Complex64(alpha), Complex64(static_cast<float>(one)));
    case abi::CUDA_C_64F:
      return gemm(p, alpha, Complex128(one));
    default:
      return gemm(p, static_cast<float>(alpha.real()), static_cast<float>(one));
  }
}

// A segment that is no multiple of the kernel's k unit must end its batch.
template <typename Gemm>
void MultiplyBatches(const KSegments& segments, int64_t unit, bool adds, Gemm gemm) {
  KSegments batch;
  for (const Product& segment : segments) {
    batch.push_back(segment);
    if (segment.k % unit == 0 && &segment != &segments.back()) continue;
    gemm(batch, adds);
    batch.clear();
    adds = true;
  }
}

}  // namespace

void Multiply(const KernelChoice& choice, const KSegments& segments, std::complex<double> alpha, bool adds,
              char* scratch) {
  const float factor = static_cast<float>(alpha.real());
  const auto beta_of = [](bool adds_now) { return adds_now ? 1.0f : 0.0f; };
  const auto one_by_one = [&](auto gemm) {
    for (const Product& p : segments) gemm(p, adds || &p != segments.data());
  };
  const auto in_batches = [&](auto gemm) { MultiplyBatches(segments, KUnit(choice.kernel), adds, gemm); };
  switch (choice.kernel) {
    case Kernel::kBlas:
      return one_by_one([&](const Product& p, bool adds_now) { BlasGemm(choice.type, p, alpha, adds_now); });
    case Kernel::kWideningBlas:
      return one_by_one([&](const Product& p, bool adds_now) {
        blocked_gemm(WideningKernel(choice.type, factor, adds_now), &p, 1, scratch);
      });
    case Kernel::kAmx:
      return in_batches([&](const KSegments& x, bool adds_now) { amx_gemm(x, factor, beta_of(adds_now), scratch); });
    case Kernel::kAvx512Bf16:
      return in_batches(
          [&](const KSegments& x, bool adds_now) { avx512_bf16_gemm(x, factor, beta_of(adds_now), scratch); });
    case Kernel::kAmxFewColumns:
      return in_batches([&](const KSegments& x, bool adds_now) { bf16_small_n_gemm(Bf16Sums::kAmx, x, adds_now); });
    case Kernel::kAvx512Bf16FewColumns:
      return in_batches(
          [&](const KSegments& x, bool adds_now) { bf16_small_n_gemm(Bf16Sums::kAvx512Bf16, x, adds_now); });
    case Kernel::kSimd:
      return simd_gemm(simd_level(), choice.type, segments, alpha.real(), adds, scratch);
    case Kernel::kSimdFewColumns:
      return simd_small_n_gemm(simd_level(), choice.type, segments, alpha.real(), adds);
  }
}

int64_t ScratchBytes(const KernelChoice& choice, int64_t m, int64_t n, int64_t k) {
  switch (choice.kernel) {
    case Kernel::kWideningBlas:
      return scratch_of(WideningKernel(choice.type), m, n, k).bytes();
    case Kernel::kAmx:
    case Kernel::kAmxFewColumns:  // which alpha decides, and a workspace is made before alpha is known
      return amx_gemm_scratch(m, n, k);
    case Kernel::kAvx512Bf16:
    case Kernel::kAvx512Bf16FewColumns:
      return avx512_bf16_gemm_scratch(m, n, k);
    case Kernel::kSimd:
      return simd_gemm_scratch(simd_level(), choice.type, m, n, k);
    case Kernel::kBlas:
    case Kernel::kSimdFewColumns:
      break;
  }
  return 0;
}

}  // namespace jaxmp::hostmp
