// A is read once, in the order of memory, and the results have the bits of the kernels that pack A, because the sums of
// their instructions are written out (Intel SDM, volume 2, TDPBF16PS and VDPBF16PS). The tile instruction multiplies 32
// k at a time: it sums even and odd k separately, from zero, by fused multiply-add, adds the two, and adds the result
// to the sum. The vector instruction takes a pair of k. Both treat subnormal inputs and results as zero.
#include <algorithm>

#include "csrc/base/float_state.h"
#include "csrc/hostmp/cpu/avx512.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/pack_bf16.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kVectors = 2;      // of rows: a cache line
constexpr int64_t kRows = 2048;  // of 4 columns: their sums stay in the L1 cache
constexpr int64_t kDepth = 32;   // k of a block

// At most 32 rows of A and 32 k. `b` has the words of each column of op(B): floats, or pairs of bfloat16.
struct Block {
  const uint16_t* a;
  int64_t lda, rows, depth;
  const uint32_t (*b)[kDepth];

  __mmask16 Lanes(int vector) const {
    return static_cast<__mmask16>(0xffff >> (kLanes - std::clamp<int64_t>(rows - vector * kLanes, 0, kLanes)));
  }
};

// Loads 16 rows of a column of A into the lower halves of the lanes. Prefetches the same rows of the next block,
// because a block has more columns than the processor follows by itself.
JAXMP_AVX512_BF16 inline __m512i LoadRows(const Block& block, int64_t k, int vector) {
  if (vector == 0) _mm_prefetch(reinterpret_cast<const char*>(block.a + (k + kDepth) * block.lda), _MM_HINT_T0);
  return _mm512_cvtepu16_epi32(
      _mm256_maskz_loadu_epi16(block.Lanes(vector), block.a + k * block.lda + vector * kLanes));
}

template <int Cols>
using Sums = __m512[Cols][kVectors];

template <int Cols>
JAXMP_AVX512_BF16 inline void AddProducts(const Block& block, int64_t k, Sums<Cols>& sums) {
  for (int v = 0; v < kVectors; ++v) {
    const __m512 rows = _mm512_castsi512_ps(_mm512_slli_epi32(LoadRows(block, k, v), 16));
    for (int col = 0; col < Cols; ++col) {
      const __m512 weight = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(block.b[col][k])));
      sums[col][v] = _mm512_fmadd_ps(rows, weight, sums[col][v]);
    }
  }
}

// Adds like the tile instruction, which also multiplies the zeros around a matrix: they make +0 of -0.
template <int Cols>
JAXMP_AVX512_BF16 inline void AddAsTiles(const Block& block, Sums<Cols>& sums) {
  const __m512 zero = _mm512_setzero_ps();
  Sums<Cols> even, odd;
  for (int col = 0; col < Cols; ++col) {
    for (int v = 0; v < kVectors; ++v) even[col][v] = odd[col][v] = zero;
  }
  int64_t k = 0;
  for (; k + 2 <= block.depth; k += 2) {
    AddProducts<Cols>(block, k, even);
    AddProducts<Cols>(block, k + 1, odd);
  }
  if (k < block.depth) AddProducts<Cols>(block, k, even);
  for (int col = 0; col < Cols; ++col) {
    for (int v = 0; v < kVectors; ++v) {
      if (block.depth < kDepth - 1) even[col][v] = _mm512_add_ps(even[col][v], zero);
      if (block.depth < kDepth) odd[col][v] = _mm512_add_ps(odd[col][v], zero);
      sums[col][v] = _mm512_add_ps(sums[col][v], _mm512_add_ps(even[col][v], odd[col][v]));
    }
  }
}

template <int Cols>
JAXMP_AVX512_BF16 inline void AddAsVectors(const Block& block, Sums<Cols>& sums) {
  for (int64_t k = 0; k < block.depth; k += 2) {
    for (int v = 0; v < kVectors; ++v) {
      __m512i pairs = LoadRows(block, k, v);
      if (k + 1 < block.depth) pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(LoadRows(block, k + 1, v), 16));
      for (int col = 0; col < Cols; ++col) {
        const __m512i weights = _mm512_set1_epi32(static_cast<int>(block.b[col][k / 2]));
        sums[col][v] = _mm512_dpbf16_ps(sums[col][v], (__m512bh)pairs, (__m512bh)weights);
      }
    }
  }
}

// Reads the words of `depth` numbers of column `col` of op(B), from `k` on.
void ReadWeights(Bf16Sums kind, const Bf16View& b, int64_t col, int64_t k, int64_t depth, uint32_t* words) {
  const int64_t step = b.is_adjacent_in_k ? 1 : b.ld;
  const uint16_t* const from = b.data + (b.is_adjacent_in_k ? col * b.ld + k : k * b.ld + col);
  const auto number = [&](int64_t i) { return i < depth ? uint32_t{from[i * step]} : 0; };
  for (int64_t i = 0; i < depth; ++i) {
    words[i] = kind == Bf16Sums::kAmx ? number(i) << 16 : number(2 * i) | number(2 * i + 1) << 16;
  }
}

template <int Cols>
JAXMP_AVX512_BF16 void AddSlice(Bf16Sums kind, const KSlice<Product>& slice, int64_t row, int64_t rows,
                                float (&sums)[Cols][kRows]) {
  const Bf16View a = ViewOfA(slice), b = ViewOfB(slice);
  const ScopedFloatState flush(FloatState::Current().Flushing());
  for (int64_t k = 0; k < slice.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, slice.depth - k);
    alignas(64) uint32_t words[Cols][kDepth];
    for (int col = 0; col < Cols; ++col) ReadWeights(kind, b, col, k, depth, words[col]);
    for (int64_t at = 0; at < rows; at += kVectors * kLanes) {
      const Block block = {a.data + k * a.ld + row + at, a.ld, rows - at, depth, words};
      Sums<Cols> block_sums;
      for (int col = 0; col < Cols; ++col) {
        for (int v = 0; v < kVectors; ++v) block_sums[col][v] = _mm512_load_ps(sums[col] + at + v * kLanes);
      }
      kind == Bf16Sums::kAmx ? AddAsTiles<Cols>(block, block_sums) : AddAsVectors<Cols>(block, block_sums);
      for (int col = 0; col < Cols; ++col) {
        for (int v = 0; v < kVectors; ++v) _mm512_store_ps(sums[col] + at + v * kLanes, block_sums[col][v]);
      }
    }
  }
}

template <int Cols>
JAXMP_AVX512_BF16 void Multiply(Bf16Sums kind, const KSegments& segments, bool adds) {
  const Product& p = segments.front();
  const KBlocks<Product> blocks(segments.data(), segments.size(), kind == Bf16Sums::kAmx ? kAmxKC : kKC);
  alignas(64) float sums[Cols][kRows];
  for (int64_t row = 0; row < p.m; row += kRows) {
    const int64_t rows = std::min(kRows, p.m - row);
    for (const KBlock<Product>& block : blocks) {
      for (auto& column : sums) std::fill_n(column, kRows, 0.0f);
      for (const KSlice<Product>& slice : block) AddSlice<Cols>(kind, slice, row, rows, sums);
      for (int col = 0; col < Cols; ++col) {
        float* const c = static_cast<float*>(p.c) + col * p.ldc + row;
        const bool is_first = !adds && block.first == 0;
        for (int64_t i = 0; i < rows; ++i) c[i] = is_first ? sums[col][i] : c[i] + sums[col][i];
      }
    }
  }
}

}  // namespace

void Bf16SmallNGemm(Bf16Sums kind, const KSegments& segments, bool adds) {
  switch (segments.front().n) {
    case 1:
      return Multiply<1>(kind, segments, adds);
    case 2:
      return Multiply<2>(kind, segments, adds);
    case 3:
      return Multiply<3>(kind, segments, adds);
    default:
      return Multiply<kBf16SmallN>(kind, segments, adds);
  }
}

}  // namespace jaxmp::hostmp

#endif
