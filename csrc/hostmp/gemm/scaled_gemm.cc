#include "csrc/hostmp/gemm/scaled_gemm.h"

#include <algorithm>

#include "csrc/hostmp/kernels/amx_gemm.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {
namespace {

// Of k, decoded at a time; also bounds sums of 8-bit integers to 2^24, up to which floats are exact.
constexpr int64_t kDepth = 1024;
constexpr int64_t kScaleBlock = 128;
static_assert(kDepth % kOrderedPanel == 0 && kDepth % kAmxPanel == 0, "a panel of a sum is decoded at once");
constexpr int64_t kAlign = 64;

// One stored column of `count` numbers along k, each block times its scale.
void decode_scaled(const NarrowOperand& x, const char* from, int64_t inner, int64_t outer, int64_t count,
                   BFloat16* to) {
  const int64_t block = block_of(x.scales.mode), blocks = x.inners / block;
  for (int64_t i = 0; i < count; i += block) {
    const float scale = x.scales.block((inner + i) / block, outer, blocks);
    decode(x.type, from + bytes_of(x.type, i), block, scale, to + i);
  }
}

// `depth` of k from `at` on, of `count` indices: a panel in the operand's own order, `ld` from one index (or, where the
// operand is not adjacent in k, one k) to the next.
void decode_panel(const NarrowOperand& x, int64_t at, int64_t depth, int64_t count, BFloat16* to, int64_t ld) {
  if (!x.is_adjacent_in_k) {
    for (int64_t i = 0; i < depth; ++i) {
      decode(x.type, x.data + bytes_of(x.type, (at + i) * x.ld), count, 1.0f, to + i * ld);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const char* const from = x.data + bytes_of(x.type, i * x.ld + at);
    if (is_tiled(x.scales.mode)) {
      decode_scaled(x, from, x.inner + at, x.outer + i, depth, to + i * ld);
    } else {
      decode(x.type, from, depth, 1.0f, to + i * ld);
    }
  }
}

// The columns of all ranks next to each other.
void decode_columns(const std::vector<NarrowColumns>& columns, int64_t at, int64_t depth, BFloat16* to, int64_t ld) {
  for (const auto& [n, x] : columns) {
    decode_panel(x, at, depth, n, to, ld);
    to += n * (x.is_adjacent_in_k ? ld : 1);
  }
}

struct Scratch {
  BFloat16 *a, *b;
  float *sums, *row_scales;
  char* kernel;
};

int64_t aligned(int64_t bytes) { return round_up(bytes, kAlign); }

Scratch divide(char* scratch, bool has_sums, int64_t m, int64_t n, int64_t depth) {
  const auto take = [&scratch](int64_t bytes) {
    char* const taken = scratch;
    scratch += aligned(bytes);
    return taken;
  };
  Scratch parts{};
  parts.a = reinterpret_cast<BFloat16*>(take(2 * m * depth));
  parts.b = reinterpret_cast<BFloat16*>(take(2 * n * depth));
  if (has_sums) {
    parts.sums = reinterpret_cast<float*>(take(4 * m * n));
    parts.row_scales = reinterpret_cast<float*>(take(4 * m));
  }
  parts.kernel = scratch;
  return parts;
}

void add_integers(const NarrowProduct& p, const float* sums, double alpha, bool adds) {
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

void add_scaled(const NarrowProduct& p, int64_t at, const Scratch& scratch, float alpha, bool adds) {
  const auto scale_of = [at](const NarrowOperand& x, int64_t index) {
    return x.scales.of_sum((x.inner + at) / kScaleBlock, x.outer + index, ceil_div(x.inners, kScaleBlock), x.outers);
  };
  for (int64_t row = 0; row < p.m; ++row) scratch.row_scales[row] = alpha * scale_of(p.a, row);
  float* c = static_cast<float*>(p.c);
  const float* sum = scratch.sums;
  for (const auto& [n, x] : p.b) {
    for (int64_t col = 0; col < n; ++col, c += p.ldc, sum += p.m) {
      const float scale = scale_of(x, col);
      for (int64_t row = 0; row < p.m; ++row) {
        const float term = scratch.row_scales[row] * scale * sum[row];
        c[row] = adds ? c[row] + term : term;
      }
    }
  }
}

}  // namespace

void narrow_gemm(const NarrowProduct& p, double alpha, bool adds, char* memory) {
  const NarrowOperand& b = p.b.front().x;
  const bool has_sums = applies_to_sums(p.a.type, p.a.scales, b.scales);
  const bool by_blocks = block_of(p.a.scales.mode) == kScaleBlock || block_of(b.scales.mode) == kScaleBlock;
  const Scratch scratch = divide(memory, has_sums, p.m, p.n, std::min(p.k, kDepth));
  for (int64_t at = 0; at < p.k; at += kDepth) {
    const int64_t panel = std::min(kDepth, p.k - at);
    const bool is_a_k = p.a.is_adjacent_in_k, is_b_k = b.is_adjacent_in_k;
    decode_panel(p.a, at, panel, p.m, scratch.a, is_a_k ? panel : p.m);
    decode_columns(p.b, at, panel, scratch.b, is_b_k ? panel : p.n);
    const int64_t step = by_blocks ? kScaleBlock : panel;
    for (int64_t from = 0; from < panel; from += step, adds = true) {
      const int64_t depth = std::min(step, panel - from);
      const Product product = {is_a_k ? abi::CUBLAS_OP_T : abi::CUBLAS_OP_N,
                               is_b_k ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                               p.m,
                               p.n,
                               depth,
                               scratch.a + from * (is_a_k ? 1 : p.m),
                               is_a_k ? panel : p.m,
                               scratch.b + from * (is_b_k ? 1 : p.n),
                               is_b_k ? panel : p.n,
                               has_sums ? scratch.sums : p.c,
                               has_sums ? p.m : p.ldc};
      if (!has_sums) {
        gemm16(abi::CUDA_R_16BF, {product}, static_cast<float>(alpha), adds ? 1.0f : 0.0f, scratch.kernel);
        continue;
      }
      gemm16(abi::CUDA_R_16BF, {product}, 1.0f, 0.0f, scratch.kernel);
      if (p.a.type == abi::CUDA_R_8I) {
        add_integers(p, scratch.sums, alpha, adds);
      } else {
        add_scaled(p, at + from, scratch, static_cast<float>(alpha), adds);
      }
    }
  }
}

void narrow_gemm_in_order(const std::vector<NarrowProduct>& parts, char* memory) {
  const NarrowProduct& first = parts.front();
  const Scales &scales_a = first.a.scales, &scales_b = first.b.front().x.scales;
  const bool has_sums = applies_to_sums(first.a.type, scales_a, scales_b);
  const bool by_blocks = block_of(scales_a.mode) == kScaleBlock || block_of(scales_b.mode) == kScaleBlock;
  int64_t k = 0;
  for (const NarrowProduct& part : parts) k += part.k;
  const Scratch scratch = divide(memory, has_sums, first.m, first.n, std::min(k, kDepth));
  size_t scaling = 0;  // the part whose scales are next
  int64_t passed = 0;  // k of those before it
  bool adds = false;
  for (int64_t at = 0; at < k; at += kDepth) {
    const int64_t panel = std::min(kDepth, k - at);
    int64_t begin = 0;
    for (const NarrowProduct& part : parts) {
      const int64_t from = std::max(at, begin), depth = std::min(at + panel, begin + part.k) - from;
      if (depth > 0) decode_panel(part.a, from - begin, depth, part.m, scratch.a + from - at, panel);
      if (depth > 0) decode_columns(part.b, from - begin, depth, scratch.b + from - at, panel);
      begin += part.k;
    }
    const int64_t step = by_blocks ? kScaleBlock : panel;
    for (int64_t from = 0; from < panel; from += step, adds = true) {
      const Product product = {abi::CUBLAS_OP_T,
                               abi::CUBLAS_OP_N,
                               first.m,
                               first.n,
                               std::min(step, panel - from),
                               scratch.a + from,
                               panel,
                               scratch.b + from,
                               panel,
                               has_sums ? scratch.sums : first.c,
                               has_sums ? first.m : first.ldc};
      ordered_gemm(abi::CUDA_R_16BF, {product}, adds && !has_sums, scratch.kernel);
      if (!has_sums) continue;
      while (at + from >= passed + parts[scaling].k) passed += parts[scaling++].k;
      add_scaled(parts[scaling], at + from - passed, scratch, 1.0f, adds);
    }
  }
}

int64_t narrow_scratch(bool has_sums, bool is_ordered, int64_t m, int64_t n, int64_t k) {
  const int64_t depth = std::min(k, kDepth);
  const int64_t sums = has_sums ? aligned(4 * m * n) + aligned(4 * m) : 0;
  const int64_t product = aligned(2 * m * depth) + aligned(2 * n * depth) + sums;
  const int64_t kernel =
      is_ordered ? ordered_gemm_scratch(abi::CUDA_R_16BF, m, n, depth) : gemm16_scratch(abi::CUDA_R_16BF, m, n, depth);
  return std::max(product + kernel, aligned(4 * m));
}

}  // namespace jaxmp::hostmp
