#include "csrc/hostmp/gemm/gemm_dispatch.h"

#include <algorithm>

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/int8_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"

namespace jaxmp::hostmp {
namespace {

// Widens K blocks of both operands for sgemm, without reordering them. A block is deep enough for the BLAS's own
// blocking and small enough to stay in the cache. The operands have one K segment; C is one tile.
struct WideningKernel {
  static constexpr int64_t kKC = 512, kMC = kUncut, kNC = kUncut, kMR = kUncut, kNR = kUncut;
  static constexpr bool kReusesB = false;

  int64_t ABytes(int64_t rows, int64_t depth) const { return 4 * rows * depth; }
  int64_t BBytes(int64_t cols, int64_t depth) const { return 4 * cols * depth; }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 0; }
  void PackA(const KBlock<Product>& block, int64_t, int64_t, char* to) const {
    const Product& p = *block.segment;
    if (p.trans_a == abi::CUBLAS_OP_N) return Pack(p.a, block.k * p.lda, p.lda, p.m, block.depth, to);
    Pack(p.a, block.k, p.lda, block.depth, p.m, to);
  }
  void PackB(const KBlock<Product>& block, int64_t, int64_t, char* to) const {
    const Product& p = *block.segment;
    if (p.trans_b == abi::CUBLAS_OP_N) return Pack(p.b, block.k, p.ldb, block.depth, p.n, to);
    Pack(p.b, block.k * p.ldb, p.ldb, p.n, block.depth, to);
  }
  void Multiply(const KBlock<Product>& block, const Packed& packed, const CTile&) const {
    Product p = *block.segment;
    p.k = block.depth;
    p.a = packed.a;
    p.lda = p.trans_a == abi::CUBLAS_OP_N ? p.m : p.k;
    p.b = packed.b;
    p.ldb = p.trans_b == abi::CUBLAS_OP_N ? p.k : p.n;
    Gemm(p, alpha, adds || block.first > 0 ? 1.0f : 0.0f);
  }

  // Widens `rows` x `cols` stored numbers, from number `offset` on, to dense floats.
  void Pack(const void* from, int64_t offset, int64_t ld, int64_t rows, int64_t cols, char* to) const {
    type == abi::CUDA_R_16BF ? PackAs(static_cast<const BFloat16*>(from) + offset, ld, rows, cols, to)
                             : PackAs(static_cast<const Float16*>(from) + offset, ld, rows, cols, to);
  }
  template <typename T>
  static void PackAs(const T* from, int64_t ld, int64_t rows, int64_t cols, char* to) {
    float* const wide = reinterpret_cast<float*>(to);
    for (int64_t col = 0; col < cols; ++col) Widen(from + col * ld, wide + col * rows, rows);
  }

  explicit WideningKernel(abi::cudaDataType_t type, float alpha = 1, bool adds = false)
      : type(type), alpha(alpha), adds(adds) {}
  abi::cudaDataType_t type;
  float alpha;
  bool adds;
};

void BlasGemm(abi::cudaDataType_t type, const Product& p, std::complex<double> alpha, bool adds) {
  WithType(type, [&](auto number) {
    using T = Computed<decltype(number)>;
    Gemm(p, MakeScalar<T>(alpha), MakeScalar<T>(adds));
  });
}

// Multiplies batches of segments. A batch ends after a segment with a k that is no multiple of the kernel's unit.
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

// Copies products of adjacent k together into one product.
Product Joined(const KSegments& parts, char* memory) {
  Product all = parts.front();
  all.k = 0;
  for (const Product& p : parts) all.k += p.k;
  auto *const a = reinterpret_cast<uint16_t*>(memory), *const b = a + all.m * all.k;
  int64_t at = 0;
  for (const Product& p : parts) {
    const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
    const auto *const from_a = static_cast<const uint16_t*>(p.a), *const from_b = static_cast<const uint16_t*>(p.b);
    for (int64_t k = 0; k < p.k; ++k, ++at) {
      for (int64_t row = 0; row < p.m; ++row) {
        a[at * p.m + row] = from_a[is_a_plain ? k * p.lda + row : row * p.lda + k];
      }
      for (int64_t col = 0; col < p.n; ++col) {
        b[col * all.k + at] = from_b[is_b_plain ? col * p.ldb + k : k * p.ldb + col];
      }
    }
  }
  return {abi::CUBLAS_OP_N, abi::CUBLAS_OP_N, all.m, all.n, all.k, a, all.m, b, all.k, all.c, all.ldc};
}

}  // namespace

KSegments CutAtUnits(const std::vector<int64_t>& ends, int64_t unit,
                     const std::function<Product(size_t, int64_t, int64_t)>& product_of, char* memory) {
  KSegments segments;
  int64_t at = 0;  // k covered by the segments so far
  for (size_t i = 0; i < ends.size(); ++i) {
    const int64_t whole = ends[i] == ends.back() ? ends[i] : ends[i] / unit * unit;
    if (at < whole) segments.push_back(product_of(i, at, whole));
    at = std::max(at, whole);
    if (at >= ends[i]) continue;
    KSegments parts;
    const int64_t end = std::min(at + unit, ends.back());
    for (size_t j = i; at < end; at = std::min(end, ends[j++]))
      parts.push_back(product_of(j, at, std::min(end, ends[j])));
    segments.push_back(Joined(parts, memory));
    memory += 2 * segments.back().k * (segments.back().m + segments.back().n);
  }
  return segments;
}

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
        BlockedGemm(WideningKernel(choice.type, factor, adds_now), &p, 1, scratch);
      });
    case Kernel::kAmx:
      return in_batches([&](const KSegments& x, bool adds_now) { AmxGemm(x, factor, beta_of(adds_now), scratch); });
    case Kernel::kAvx512Bf16:
      return in_batches(
          [&](const KSegments& x, bool adds_now) { Avx512Bf16Gemm(x, factor, beta_of(adds_now), scratch); });
    case Kernel::kAmxFewColumns:
      return in_batches([&](const KSegments& x, bool adds_now) { Bf16SmallNGemm(Bf16Sums::kAmx, x, adds_now); });
    case Kernel::kAvx512Bf16FewColumns:
      return in_batches([&](const KSegments& x, bool adds_now) { Bf16SmallNGemm(Bf16Sums::kAvx512Bf16, x, adds_now); });
    case Kernel::kSimd:
      return SimdGemm(simd_level(), choice.type, segments, alpha.real(), adds, scratch);
    case Kernel::kSimdFewColumns:
      return SimdSmallNGemm(simd_level(), choice.type, segments, alpha.real(), adds);
    case Kernel::kInt8:
      return one_by_one([&](const Product& p, bool adds_now) {
        Int8Gemm(int8_level(), p, static_cast<int32_t>(alpha.real()), adds_now, scratch);
      });
  }
}

int64_t ScratchBytes(const KernelChoice& choice, int64_t m, int64_t n, int64_t k) {
  switch (choice.kernel) {
    case Kernel::kWideningBlas:
      return ScratchOf(WideningKernel(choice.type), m, n, k).bytes();
    case Kernel::kAmx:
    case Kernel::kAmxFewColumns:  // alpha decides which, and a workspace is made before alpha is known
      return AmxGemmScratch(m, n, k);
    case Kernel::kAvx512Bf16:
    case Kernel::kAvx512Bf16FewColumns:
      return Avx512Bf16GemmScratch(m, n, k);
    case Kernel::kSimd:
      return SimdGemmScratch(simd_level(), choice.type, m, n, k);
    case Kernel::kInt8:
      return Int8GemmScratch(int8_level(), m, n, k);
    case Kernel::kBlas:
    case Kernel::kSimdFewColumns:
      break;
  }
  return 0;
}

}  // namespace jaxmp::hostmp
