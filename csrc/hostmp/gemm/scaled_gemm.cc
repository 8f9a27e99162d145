#include "csrc/hostmp/gemm/scaled_gemm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kAlign = 64;

BFloat16 HalfOf(BFloat16 x) {
  const int exponent = x.bits >> 7 & 0xff;
  if (exponent == 0xff) return x;
  return {static_cast<uint16_t>(exponent > 1 ? x.bits - 0x80 : x.bits & 0x8000)};
}
float HalfOf(float x) { return x / 2; }

// Converts numbers of any real type to the type that the kernels multiply.
void Convert(const ScaledOperand& x, int64_t first, int64_t count, float scale, BFloat16* to) {
  if (x.type != abi::CUDA_R_16BF) return Decode(x.type, x.data, first, count, scale, to);
  std::copy_n(reinterpret_cast<const BFloat16*>(x.data) + first, count, to);
}
void Convert(const ScaledOperand& x, int64_t first, int64_t count, float scale, float* to) {
  switch (x.type) {
    case abi::CUDA_R_16BF:
      return Widen(reinterpret_cast<const BFloat16*>(x.data) + first, to, count);
    case abi::CUDA_R_16F:
      return Widen(reinterpret_cast<const Float16*>(x.data) + first, to, count);
    case abi::CUDA_R_32F:
      return void(std::copy_n(reinterpret_cast<const float*>(x.data) + first, count, to));
    default:
      Decode(x.type, x.data, first, count, scale, to);
  }
}

// Unpacks 4-bit numbers to bytes.
void Convert(const ScaledOperand& x, int64_t first, int64_t count, float, int8_t* to) {
  Unpack(x.type, x.data, first, count, to);
}

// Decodes one stored column of `count` numbers along k, each block times its scale.
template <typename T>
void DecodeScaled(const ScaledOperand& x, int64_t first, int64_t inner, int64_t outer, int64_t count, T* to) {
  const int64_t block = BlockOf(x.scales.mode), blocks = x.inners / block;
  for (int64_t i = 0; i < count; i += block) {
    const float scale = x.scales.OfBlock((inner + i) / block, outer, blocks);
    // 2^-127 is subnormal, and threads of XLA take it for 0: the numbers are scaled by 2^-126 and halved.
    const bool is_least = x.scales.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0 && scale < 0x1p-126f;
    Convert(x, first + i, block, is_least ? 0x1p-126f : scale, to + i);
    for (int64_t j = i; is_least && j < i + block; ++j) to[j] = HalfOf(to[j]);
  }
}

// Prefetches a run of numbers, because it is on another page, which the processor does not prefetch by itself.
void Prefetch(const ScaledOperand& x, int64_t first, int64_t count) {
  constexpr int64_t kLine = 64;  // bytes of a cache line
  const char* const from = x.data + BytesOf(x.type, first);
  for (int64_t i = 0; i < BytesOf(x.type, count); i += kLine) __builtin_prefetch(from + i);
}

// Decodes `depth` k from `at` on, of `count` indices from `begin` on, in the operand's own order. `ld` is the distance
// from one index to the next or, if the operand is not adjacent in k, from one k to the next.
template <typename T>
void DecodeBlock(const ScaledOperand& x, int64_t at, int64_t depth, int64_t begin, int64_t count, T* to, int64_t ld) {
  if (!x.is_adjacent_in_k) {
    for (int64_t i = 0; i < depth; ++i) {
      const int64_t first = x.first + (at + i) * x.ld + begin;
      Prefetch(x, first + x.ld, count);
      Convert(x, first, count, 1.0f, to + i * ld);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = x.first + (begin + i) * x.ld + at;
    Prefetch(x, first + x.ld, depth);
    if (IsTiled(x.scales.mode)) {
      DecodeScaled(x, first, x.inner + at, x.outer + begin + i, depth, to + i * ld);
    } else {
      Convert(x, first, depth, 1.0f, to + i * ld);
    }
  }
}

// Decodes the columns of all ranks next to each other.
template <typename T>
void DecodeColumns(const std::vector<ScaledColumns>& columns, int64_t at, int64_t depth, T* to, int64_t ld) {
  for (const auto& [n, x] : columns) {
    DecodeBlock(x, at, depth, 0, n, to, ld);
    to += n * (x.is_adjacent_in_k ? ld : 1);
  }
}

template <typename T>
void DecodeB(const KBlock<ScaledProduct>& block, int64_t cols, T* to) {
  const bool is_k = block.segment->b.front().x.is_adjacent_in_k;
  for (const KSlice<ScaledProduct>& slice : block) {
    DecodeColumns(slice.segment->b, slice.k, slice.depth, to + slice.offset * (is_k ? 1 : cols),
                  is_k ? block.depth : cols);
  }
}

// sum * a * b, also if a * b exceeds the range of floats.
float Scaled(float sum, float a, float b) {
  const float both = a * b;
  return std::isnormal(both) ? both * sum : static_cast<float>(double{a} * b * sum);
}

void AddScaled(const ScaledProduct& p, int64_t at, const float* sum, float* row_scales, bool adds) {
  const auto scale_of = [at](const ScaledOperand& x, int64_t index) {
    return x.scales.OfSum((x.inner + at) / kScaleBlock, x.outer + index, CeilDiv(x.inners, kScaleBlock), x.outers);
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
        const float term = are_normal ? row_scales[row] * scale * sum[row] : Scaled(sum[row], row_scales[row], scale);
        c[row] = adds ? c[row] + term : term;
      }
    }
  }
}

// Decodes K blocks of both operands to T. If scales apply to sums, each sum goes through memory; this is for bf16 only,
// and rows are then not cut. As floats, a block of op(A) of 1 MiB stays in the L2 or L3 cache.
template <typename T>
struct DecodingKernel {
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  static constexpr int64_t kKC = kIsFloat ? 512 : 1024;
  static constexpr int64_t kMC = kIsFloat ? 512 : kUncut, kNC = kUncut, kMR = kUncut, kNR = kUncut;
  static constexpr bool kReusesB = false;
  static constexpr abi::cudaDataType_t kType = kIsFloat ? abi::CUDA_R_32F : abi::CUDA_R_16BF;
  static_assert(kKC % hostmp::kKC == 0 && (kIsFloat || kKC % kAmxKC == 0),
                "a K block of the inner product is decoded at once");

  DecodingKernel(Kernel kernel, bool has_sums) : kernel{kernel, kType}, has_sums(has_sums) {}
  DecodingKernel(Kernel kernel, const ScaledProduct& p, double alpha, bool adds)
      : DecodingKernel(kernel, ScalesSums(p.a.scales.mode) || ScalesSums(p.b.front().x.scales.mode)) {
    is_a_k = p.a.is_adjacent_in_k;
    is_b_k = p.b.front().x.is_adjacent_in_k;
    by_blocks = BlockOf(p.a.scales.mode) == kScaleBlock || BlockOf(p.b.front().x.scales.mode) == kScaleBlock;
    this->alpha = alpha;
    this->adds = adds;
  }

  int64_t ABytes(int64_t rows, int64_t depth) const { return rows * depth * int64_t{sizeof(T)}; }
  int64_t BBytes(int64_t cols, int64_t depth) const { return cols * depth * int64_t{sizeof(T)}; }
  int64_t SumsBytes(int64_t m, int64_t n) const { return has_sums ? RoundUp(4 * m * n, kAlign) : 0; }
  int64_t RowScalesBytes(int64_t m) const { return has_sums ? RoundUp(4 * m, kAlign) : 0; }
  int64_t OwnBytes(int64_t m, int64_t n, int64_t depth) const {
    return SumsBytes(m, n) + RowScalesBytes(m) + ScratchBytes(kernel, std::min(m, kMC), n, depth);
  }

  void PackA(const KBlock<ScaledProduct>& block, int64_t top, int64_t rows, char* to) const {
    T* const a = reinterpret_cast<T*>(to);
    for (const KSlice<ScaledProduct>& slice : block) {
      DecodeBlock(slice.segment->a, slice.k, slice.depth, top, rows, a + slice.offset * (is_a_k ? 1 : rows),
                  is_a_k ? block.depth : rows);
    }
  }
  void PackB(const KBlock<ScaledProduct>& block, int64_t, int64_t cols, char* to) const {
    DecodeB(block, cols, reinterpret_cast<T*>(to));
  }

  void Multiply(const KBlock<ScaledProduct>& block, const Packed& packed, const CTile& tile) const {
    const ScaledProduct& p = *block.segment;
    float* const sums = reinterpret_cast<float*>(packed.own);
    float* const row_scales = reinterpret_cast<float*>(packed.own + SumsBytes(p.m, p.n));
    char* const inner = packed.own + SumsBytes(p.m, p.n) + RowScalesBytes(p.m);
    const auto* const a = reinterpret_cast<const T*>(packed.a);
    const auto* const b = reinterpret_cast<const T*>(packed.b);
    const ScaledProduct* scaled_by = block.segment;  // the segment of the next scales
    int64_t passed = -block.k;                       // its first k, counted from the first k of the block
    const int64_t step = by_blocks ? kScaleBlock : block.depth;
    for (int64_t from = 0; from < block.depth; from += step) {
      const bool adds_now = adds || block.first + from > 0;
      const Product product = {is_a_k ? abi::CUBLAS_OP_T : abi::CUBLAS_OP_N,
                               is_b_k ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                               tile.rows,
                               p.n,
                               std::min(step, block.depth - from),
                               a + from * (is_a_k ? 1 : tile.rows),
                               is_a_k ? block.depth : tile.rows,
                               b + from * (is_b_k ? 1 : p.n),
                               is_b_k ? block.depth : p.n,
                               has_sums ? sums : static_cast<float*>(p.c) + tile.row,
                               has_sums ? p.m : p.ldc};
      hostmp::Multiply(kernel, {product}, has_sums ? 1.0 : alpha, adds_now && !has_sums, inner);
      if (!has_sums) continue;
      while (from >= passed + scaled_by->k) passed += scaled_by++->k;
      AddScaled(*scaled_by, from - passed, sums, row_scales, adds_now);
    }
  }

  KernelChoice kernel;  // for the decoded numbers
  bool has_sums, is_a_k = true, is_b_k = true, by_blocks = false;
  double alpha = 1;
  bool adds = false;
};

bool IsByteInteger(abi::cudaDataType_t type) { return type == abi::CUDA_R_8I || type == abi::CUDA_R_8U; }

bool IsHalfByte(abi::cudaDataType_t type) { return Facts(type).bits == 4; }

// Multiplies few columns, op(A) = A, as SimdGemm does, and reads A in place. 8-bit integers, and float8 for up to 8
// columns, become floats in the registers. Other numbers are converted in the L1 cache a few k before use: 4-bit
// numbers to bytes (E2M1 doubled), the others to floats.
struct FewColumnsKernel {
  static constexpr int64_t kKC = hostmp::kKC, kMC = 512, kNC = kUncut, kMR = kUncut, kNR = kUncut;
  static constexpr bool kReusesB = false;
  static constexpr int64_t kStrip = 4;          // k
  static constexpr int64_t kFloat8Columns = 8;  // that share one decoding

  int64_t ABytes(int64_t, int64_t) const { return 0; }
  int64_t BBytes(int64_t cols, int64_t depth) const { return 4 * cols * depth; }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 4 * kMC * (kSmallN + kStrip); }
  void PackA(const KBlock<ScaledProduct>&, int64_t, int64_t, char*) const {}
  void PackB(const KBlock<ScaledProduct>& block, int64_t, int64_t cols, char* to) const {
    DecodeB(block, cols, reinterpret_cast<float*>(to));
  }

  void Multiply(const KBlock<ScaledProduct>& block, const Packed& packed, const CTile& tile) const {
    const ScaledProduct& p = *block.segment;
    float* const sums = reinterpret_cast<float*>(packed.own);
    const float factor = p.a.type == abi::CUDA_R_4F_E2M1 ? alpha / 2 : alpha;
    for (int64_t col = 0; col < p.n; col += kSmallN) {
      const int64_t cols = std::min(kSmallN, p.n - col);
      std::fill_n(sums, kMC * cols, 0.0f);
      for (const KSlice<ScaledProduct>& slice : block) {
        const float* const b = reinterpret_cast<const float*>(packed.b) +
                               (is_b_k ? col * block.depth + slice.offset : slice.offset * p.n + col);
        AddSlice(slice, tile, {b, is_b_k ? block.depth : p.n, cols}, sums, sums + kMC * kSmallN);
      }
      for (int64_t i = 0; i < cols; ++i) {
        float* const c = static_cast<float*>(p.c) + (col + i) * p.ldc + tile.row;
        for (int64_t row = 0; row < tile.rows; ++row) {
          const float term = factor * sums[i * kMC + row];
          c[row] = adds || block.first > 0 ? c[row] + term : term;
        }
      }
    }
  }

  struct Columns {
    const float* data;
    int64_t ld, count;
  };
  void AddSlice(const KSlice<ScaledProduct>& slice, const CTile& tile, const Columns& b, float* sums,
                float* strip) const {
    const ScaledOperand& a = slice.segment->a;
    const bool has_float8 = IsFloat8(a.type) && b.count <= kFloat8Columns && simd_level() != SimdLevel::kNeon;
    const bool is_in_place = has_float8 || IsByteInteger(a.type) || a.type == abi::CUDA_R_32F;
    const bool is_nibble = IsHalfByte(a.type);
    const abi::cudaDataType_t type = is_in_place ? a.type : is_nibble ? abi::CUDA_R_8I : abi::CUDA_R_32F;
    const int64_t step = is_in_place ? slice.depth : kStrip;
    for (int64_t k = 0; k < slice.depth; k += step) {
      const int64_t depth = std::min(step, slice.depth - k);
      const void* from = strip;
      if (is_in_place) {
        from = a.data + BytesOf(a.type, a.first + (slice.k + k) * a.ld + tile.row);
      } else if (is_nibble) {
        DecodeBlock(a, slice.k + k, depth, tile.row, tile.rows, reinterpret_cast<int8_t*>(strip), kMC);
      } else {
        DecodeBlock(a, slice.k + k, depth, tile.row, tile.rows, strip, kMC);
      }
      const auto trans_b = is_b_k ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T;
      const int64_t lda = is_in_place ? a.ld : kMC;
      SimdAddColumns(simd_level(), type,
                     {abi::CUBLAS_OP_N, trans_b, tile.rows, b.count, depth, from, lda, b.data + k * (is_b_k ? 1 : b.ld),
                      b.ld, sums, kMC});
    }
  }

  float alpha;
  bool adds, is_b_k;
};

template <typename Function>
auto WithDecodedType(const KernelChoice& choice, Function function) {
  return choice.type == abi::CUDA_R_32F ? function(float{}) : function(BFloat16{});
}

}  // namespace

void ScaledGemm(const KernelChoice& choice, const std::vector<ScaledProduct>& segments, double alpha, bool adds,
                char* scratch) {
  if (choice.conversion == Conversion::kDecodedFewColumns) {
    const bool is_b_k = segments.front().b.front().x.is_adjacent_in_k;
    const FewColumnsKernel kernel = {static_cast<float>(alpha), adds, is_b_k};
    return BlockedGemm(kernel, segments.data(), segments.size(), scratch);
  }
  WithDecodedType(choice, [&](auto number) {
    const DecodingKernel<decltype(number)> kernel(choice.kernel, segments.front(), alpha, adds);
    BlockedGemm(kernel, segments.data(), segments.size(), scratch);
  });
}

int64_t ScaledGemmScratch(const KernelChoice& choice, bool scales_sums, int64_t m, int64_t n, int64_t k) {
  const int64_t bytes = choice.conversion == Conversion::kDecodedFewColumns
                            ? ScratchOf(FewColumnsKernel{}, m, n, k).bytes()
                            : WithDecodedType(choice, [&](auto number) {
                                const DecodingKernel<decltype(number)> kernel(choice.kernel, scales_sums);
                                return ScratchOf(kernel, m, n, k).bytes();
                              });
  return std::max(bytes, RoundUp(4 * m, kAlign));
}

}  // namespace jaxmp::hostmp
