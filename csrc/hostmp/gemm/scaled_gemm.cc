#include "csrc/hostmp/gemm/scaled_gemm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/kernels/amx_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kAlign = 64;

BFloat16 half_of(BFloat16 x) {
  const int exponent = x.bits >> 7 & 0xff;
  if (exponent == 0xff) return x;
  return {static_cast<uint16_t>(exponent > 1 ? x.bits - 0x80 : x.bits & 0x8000)};
}

// One stored column of `count` numbers along k, each block times its scale.
void decode_scaled(const ScaledOperand& x, const char* from, int64_t inner, int64_t outer, int64_t count,
                   BFloat16* to) {
  const int64_t block = block_of(x.scales.mode), blocks = x.inners / block;
  for (int64_t i = 0; i < count; i += block) {
    const float scale = x.scales.block((inner + i) / block, outer, blocks);
    // 2^-127, which is subnormal: threads of XLA take it for 0.
    const bool is_least = x.scales.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 && scale < 0x1p-126f;
    decode(x.type, from + bytes_of(x.type, i), block, is_least ? 0x1p-126f : scale, to + i);
    for (int64_t j = i; is_least && j < i + block; ++j) to[j] = half_of(to[j]);
  }
}

// Asks for a run of numbers ahead of its use: it is on a page of its own, where the processor does not look.
void prefetch(const char* from, int64_t bytes) {
  constexpr int64_t kLine = 64;  // of the cache
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(from + i);
}

// `depth` of k from `at` on, of `count` indices: in the operand's own order, `ld` from one index (or, where the
// operand is not adjacent in k, one k) to the next.
void decode_block(const ScaledOperand& x, int64_t at, int64_t depth, int64_t count, BFloat16* to, int64_t ld) {
  if (!x.is_adjacent_in_k) {
    for (int64_t i = 0; i < depth; ++i) {
      prefetch(x.data + bytes_of(x.type, (at + i + 1) * x.ld), bytes_of(x.type, count));
      decode(x.type, x.data + bytes_of(x.type, (at + i) * x.ld), count, 1.0f, to + i * ld);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const char* const from = x.data + bytes_of(x.type, i * x.ld + at);
    prefetch(from + bytes_of(x.type, x.ld), bytes_of(x.type, depth));
    if (is_tiled(x.scales.mode)) {
      decode_scaled(x, from, x.inner + at, x.outer + i, depth, to + i * ld);
    } else {
      decode(x.type, from, depth, 1.0f, to + i * ld);
    }
  }
}

// The columns of all ranks next to each other.
void decode_columns(const std::vector<ScaledColumns>& columns, int64_t at, int64_t depth, BFloat16* to, int64_t ld) {
  for (const auto& [n, x] : columns) {
    decode_block(x, at, depth, n, to, ld);
    to += n * (x.is_adjacent_in_k ? ld : 1);
  }
}

void add_integers(const ScaledProduct& p, const float* sums, double alpha, bool adds) {
  const auto factor = static_cast<uint32_t>(static_cast<int64_t>(alpha));
  for (int64_t col = 0; col < p.n; ++col) {
    uint32_t* const c = static_cast<uint32_t*>(p.c) + col * p.ldc;
    const float* const sum = sums + col * p.m;
    for (int64_t row = 0; row < p.m; ++row) {
      const uint32_t term = factor * static_cast<uint32_t>(static_cast<int32_t>(sum[row]));
      c[row] = adds ? c[row] + term : term;
    }
  }
}

// sum * a * b, where a * b may leave the range of floats.
float scaled(float sum, float a, float b) {
  const float both = a * b;
  return std::isnormal(both) ? both * sum : static_cast<float>(double{a} * b * sum);
}

void add_scaled(const ScaledProduct& p, int64_t at, const float* sum, float* row_scales, bool adds) {
  const auto scale_of = [at](const ScaledOperand& x, int64_t index) {
    return x.scales.of_sum((x.inner + at) / kScaleBlock, x.outer + index, ceil_div(x.inners, kScaleBlock), x.outers);
  };
  float least = std::numeric_limits<float>::max(), most = 0;
  for (int64_t row = 0; row < p.m; ++row) {
    row_scales[row] = scale_of(p.a, row);
    least = std::min(least, std::abs(row_scales[row]));
    most = std::max(most, std::abs(row_scales[row]));
  }
  float* c = static_cast<float*>(p.c);
  for (const auto& [n, x] : p.b) {
    for (int64_t col = 0; col < n; ++col, c += p.ldc, sum += p.m) {
      const float scale = scale_of(x, col);
      const bool are_normal = std::isnormal(least * scale) && std::isnormal(most * scale);
      for (int64_t row = 0; row < p.m; ++row) {
        const float term = are_normal ? row_scales[row] * scale * sum[row] : scaled(sum[row], row_scales[row], scale);
        c[row] = adds ? c[row] + term : term;
      }
    }
  }
}

// Decodes K blocks of both operands. Where scales apply to sums, each sum goes through memory.
struct ScalingKernel {
  static constexpr int64_t kKC = 1024;  // also bounds sums of 8-bit integers to 2^24, up to which floats are exact
  static constexpr int64_t kMC = kUncut, kNC = kUncut, kMR = kUncut, kNR = kUncut;
  static constexpr bool kReusesB = false;
  static_assert(kKC % hostmp::kKC == 0 && kKC % kAmxKC == 0, "a K block of the inner product is decoded at once");

  ScalingKernel(bool has_sums, bool is_fixed_order) : has_sums(has_sums), is_fixed_order(is_fixed_order) {}
  ScalingKernel(const ScaledProduct& p, double alpha, bool adds, bool is_fixed_order)
      : ScalingKernel(applies_to_sums(p.a.type, p.a.scales, p.b.front().x.scales), is_fixed_order) {
    is_a_k = p.a.is_adjacent_in_k;
    is_b_k = p.b.front().x.is_adjacent_in_k;
    by_blocks = block_of(p.a.scales.mode) == kScaleBlock || block_of(p.b.front().x.scales.mode) == kScaleBlock;
    this->alpha = alpha;
    this->adds = adds;
  }

  int64_t a_bytes(int64_t rows, int64_t depth) const { return 2 * rows * depth; }
  int64_t b_bytes(int64_t cols, int64_t depth) const { return 2 * cols * depth; }
  int64_t sums_bytes(int64_t m, int64_t n) const { return has_sums ? round_up(4 * m * n, kAlign) : 0; }
  int64_t row_scales_bytes(int64_t m) const { return has_sums ? round_up(4 * m, kAlign) : 0; }
  int64_t own_bytes(int64_t m, int64_t n, int64_t depth) const {
    return sums_bytes(m, n) + row_scales_bytes(m) +
           (is_fixed_order ? fixed_order_gemm_scratch(abi::CUDA_R_16BF, m, n, depth)
                           : gemm16_scratch(abi::CUDA_R_16BF, m, n, depth));
  }

  void pack_a(const KBlock<ScaledProduct>& block, int64_t, int64_t rows, char* to) const {
    BFloat16* const a = reinterpret_cast<BFloat16*>(to);
    for (const KSlice<ScaledProduct>& slice : block) {
      decode_block(slice.segment->a, slice.k, slice.depth, rows, a + slice.offset * (is_a_k ? 1 : rows),
                   is_a_k ? block.depth : rows);
    }
  }
  void pack_b(const KBlock<ScaledProduct>& block, int64_t, int64_t cols, char* to) const {
    BFloat16* const b = reinterpret_cast<BFloat16*>(to);
    for (const KSlice<ScaledProduct>& slice : block) {
      decode_columns(slice.segment->b, slice.k, slice.depth, b + slice.offset * (is_b_k ? 1 : cols),
                     is_b_k ? block.depth : cols);
    }
  }

  void multiply(const KBlock<ScaledProduct>& block, const Packed& packed, const CTile&) const {
    const ScaledProduct& p = *block.segment;
    float* const sums = reinterpret_cast<float*>(packed.own);
    float* const row_scales = reinterpret_cast<float*>(packed.own + sums_bytes(p.m, p.n));
    char* const inner = packed.own + sums_bytes(p.m, p.n) + row_scales_bytes(p.m);
    const auto* const a = reinterpret_cast<const BFloat16*>(packed.a);
    const auto* const b = reinterpret_cast<const BFloat16*>(packed.b);
    const ScaledProduct* scaled_by = block.segment;  // whose scales are next
    int64_t passed = -block.k;                       // k of the block up to that segment
    const int64_t step = by_blocks ? kScaleBlock : block.depth;
    for (int64_t from = 0; from < block.depth; from += step) {
      const bool adds_now = adds || block.first + from > 0;
      const Product product = {is_a_k ? abi::CUBLAS_OP_T : abi::CUBLAS_OP_N,
                               is_b_k ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                               p.m,
                               p.n,
                               std::min(step, block.depth - from),
                               a + from * (is_a_k ? 1 : p.m),
                               is_a_k ? block.depth : p.m,
                               b + from * (is_b_k ? 1 : p.n),
                               is_b_k ? block.depth : p.n,
                               has_sums ? sums : p.c,
                               has_sums ? p.m : p.ldc};
      multiply_bf16(product, adds_now && !has_sums, inner);
      if (!has_sums) continue;
      while (from >= passed + scaled_by->k) passed += scaled_by++->k;
      if (p.a.type == abi::CUDA_R_8I) {
        add_integers(p, sums, alpha, adds_now);
      } else {
        add_scaled(*scaled_by, from - passed, sums, row_scales, adds_now);
      }
    }
  }

  void multiply_bf16(const Product& product, bool adds_to_c, char* inner) const {
    if (is_fixed_order) return fixed_order_gemm(abi::CUDA_R_16BF, {product}, adds_to_c, inner);
    gemm16(abi::CUDA_R_16BF, {product}, has_sums ? 1.0f : static_cast<float>(alpha), adds_to_c ? 1.0f : 0.0f, inner);
  }

  bool has_sums, is_fixed_order, is_a_k = true, is_b_k = true, by_blocks = false;
  double alpha = 1;
  bool adds = false;
};

}  // namespace

void scaled_gemm(const ScaledProduct& product, double alpha, bool adds, char* scratch) {
  blocked_gemm(ScalingKernel(product, alpha, adds, /*is_fixed_order=*/false), &product, 1, scratch);
}

void scaled_gemm_fixed_order(const std::vector<ScaledProduct>& segments, char* scratch) {
  blocked_gemm(ScalingKernel(segments.front(), 1, false, /*is_fixed_order=*/true), segments.data(), segments.size(),
               scratch);
}

int64_t scaled_gemm_scratch(bool has_sums, bool is_fixed_order, int64_t m, int64_t n, int64_t k) {
  return std::max(scratch_of(ScalingKernel(has_sums, is_fixed_order), m, n, k).bytes(), round_up(4 * m, kAlign));
}

}  // namespace jaxmp::hostmp
