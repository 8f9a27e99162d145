// The body of int8_gemm.cc, compiled once for each instruction set. It is included with JAXMP_TARGET, the attribute of
// every function, and with Isa in scope, which has
//   Number, kGroup   the integer that an instruction multiplies, and how many adjacent in k make one 32-bit word
//   kRowUnit, kMR, kNR, kKC
//                    rows that a micro-panel of op(A) is padded to and has at most, columns of a register tile, and k
//                    of a K block
//   kWordUnit        words that k is padded to
//   kIsUnsignedB     whether the instruction takes op(B) as unsigned: its numbers are packed plus 128, and the words of
//                    a micro-panel of op(A) are followed by the sums that make up for it
//   PutFirst(panel, width, words)
//                    writes these sums, if there are any
//   Scope            an object that lives while products run
//   Multiply(panels, sums)
//                    the product of micro-panels, column-major with kMR from one column to the next
//
// op(A) is packed in micro-panels of kMR rows: line w has word w of each row. op(B) is packed by whole
// columns. k is padded by zeros. Rows and columns that pad a register tile hold anything: their sums are dropped.

#define JAXMP_INLINE JAXMP_TARGET inline __attribute__((always_inline))

using Number = Isa::Number;
constexpr int64_t kGroup = Isa::kGroup, kMR = Isa::kMR, kNR = Isa::kNR;
constexpr int64_t kLines = 4, kRun = 64;  // words that are transposed together
static_assert(Isa::kWordUnit % kLines == 0 && Isa::kRowUnit % kLines == 0 && kMR <= kRun);

constexpr int64_t Words(int64_t depth) { return RoundUp(CeilDiv(depth, kGroup), Isa::kWordUnit); }
// Lines of a micro-panel of op(A).
constexpr int64_t Lines(int64_t depth) { return Words(depth) + Isa::kIsUnsignedB; }

constexpr uint32_t kOffsetOfB = Isa::kIsUnsignedB ? 0x80808080 : 0;

// Packs `depth` numbers that are adjacent in k to `words` words.
template <uint32_t kOffset = 0>
JAXMP_INLINE void PackRun(const int8_t* from, int64_t depth, int64_t words, uint32_t* to) {
  using Stored __attribute__((may_alias)) = Number;
  auto* const numbers = reinterpret_cast<Stored*>(to);
  for (int64_t k = 0; k < depth; ++k) numbers[k] = static_cast<Number>(from[k] ^ static_cast<int8_t>(kOffset));
  for (int64_t k = depth; k < words * kGroup; ++k) numbers[k] = 0;
}

// The numbers of word `word` of each index, from an operand that is adjacent across k.
struct WordLine {
  WordLine(const ByteView& view, int64_t depth, int64_t word) {
    for (int g = 0; g < kGroup; ++g) {
      const int64_t k = word * kGroup + g;
      lines[g] = k < depth ? view.data + k * view.ld : nullptr;
    }
  }
  // Packs at most kRun indices from `at` on.
  template <uint32_t kOffset = 0>
  JAXMP_INLINE void Pack(int64_t at, int64_t count, uint32_t* __restrict to) const {
    static constexpr int8_t kZeros[kRun] = {};
    using Unsigned = std::make_unsigned_t<Number>;
    const int8_t* runs[kGroup];
    for (int g = 0; g < kGroup; ++g) runs[g] = lines[g] ? lines[g] + at : kZeros;
    for (int64_t i = 0; i < count; ++i) {
      uint32_t word = 0;
      for (int g = 0; g < kGroup; ++g) word |= uint32_t{static_cast<Unsigned>(runs[g][i])} << (32 / kGroup * g);
      to[i] = word ^ kOffset;
    }
  }

  const int8_t* lines[kGroup];
};

// Reads every word along all micro-panels: long runs, because a large leading dimension puts each k on another page,
// which the processor does not prefetch by itself.
JAXMP_TARGET void PackRowsAcross(const ByteView& view, int64_t rows, int64_t depth, uint32_t* to) {
  constexpr int64_t kAhead = 8;
  const int64_t words = Words(depth), lines = Lines(depth);
  for (int64_t word = 0; word < words; ++word) {
    const WordLine line(view, depth, word);
    for (int g = 0; g < kGroup; ++g) {
      const int8_t* const ahead = view.data + (word * kGroup + g + kAhead) * view.ld;
      for (int64_t row = 0; row < rows; row += 64) __builtin_prefetch(ahead + row);
    }
    int64_t row = 0;
    for (; row + kMR <= rows; row += kMR) line.Pack(row, kMR, to + row * lines + word * kMR);
    line.Pack(row, rows - row, to + row * lines + word * RoundUp(rows - row, Isa::kRowUnit));
  }
}

JAXMP_TARGET void PackRowsAlong(const ByteView& view, int64_t rows, int64_t depth, uint32_t* to) {
  const int64_t words = Words(depth);
  alignas(64) uint32_t runs[kLines][kRun];
  const uint32_t* const from[kLines] = {runs[0], runs[1], runs[2], runs[3]};
  for (int64_t row = 0; row < rows; row += kLines) {
    const int64_t top = row / kMR * kMR, width = std::min(kMR, RoundUp(rows - top, Isa::kRowUnit));
    uint32_t* const panel = to + top * Lines(depth) + row - top;
    for (int64_t word = 0; word < words; word += kRun) {
      const int64_t k = word * kGroup, length = std::clamp<int64_t>(depth - k, 0, kRun * kGroup);
      for (int64_t i = 0; i < kLines; ++i) {
        const int8_t* const line = view.data + (row + i) * view.ld + k;
        for (int64_t next = 0; next < length; next += 64) __builtin_prefetch(line + kLines * view.ld + next);
        PackRun(line, row + i < rows ? length : 0, kRun, runs[i]);
      }
      TransposeLines(from, std::min(kRun, words - word), width, panel + word * width);
    }
  }
}

JAXMP_TARGET void PackColumnsAlong(const ByteView& view, int64_t cols, int64_t depth, uint32_t* to) {
  const int64_t words = Words(depth);
  for (int64_t col = 0; col < cols; ++col)
    PackRun<kOffsetOfB>(view.data + col * view.ld, depth, words, to + col * words);
}

JAXMP_TARGET void PackColumnsAcross(const ByteView& view, int64_t cols, int64_t depth, uint32_t* to) {
  const int64_t words = Words(depth);
  alignas(64) uint32_t runs[kLines][kRun];
  const uint32_t* const from[kLines] = {runs[0], runs[1], runs[2], runs[3]};
  for (int64_t col = 0; col < cols; col += kRun) {
    const int64_t length = std::min(kRun, cols - col);
    for (int64_t word = 0; word < words; word += kLines) {
      for (int64_t i = 0; i < kLines; ++i) {
        WordLine(view, depth, word + i).template Pack<kOffsetOfB>(col, length, runs[i]);
      }
      TransposeLines(from, length, words, to + col * words + word);
    }
  }
}

struct Kernel {
  static constexpr int64_t kKC = Isa::kKC, kMC = 384, kNC = 512, kMR = Isa::kMR, kNR = Isa::kNR;
  static constexpr bool kReusesB = Isa::kReusesB;
  static_assert(kMC % kMR == 0 && kNC % kNR == 0 && kKC % (kGroup * Isa::kWordUnit) == 0);
  using Scope = Isa::Scope;

  int64_t ABytes(int64_t rows, int64_t depth) const { return 4 * Lines(depth) * RoundUp(rows, Isa::kRowUnit); }
  int64_t BBytes(int64_t cols, int64_t depth) const { return 4 * Words(depth) * RoundUp(cols, kNR); }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 0; }

  JAXMP_TARGET void PackA(const KBlock<Product>& block, int64_t top, int64_t rows, char* to) const {
    auto* const words = reinterpret_cast<uint32_t*>(to);
    const auto* const a = static_cast<const int8_t*>(p.a);
    if (p.trans_a == abi::CUBLAS_OP_N) {
      PackRowsAcross({a + block.k * p.lda + top, p.lda}, rows, block.depth, words);
    } else {
      PackRowsAlong({a + top * p.lda + block.k, p.lda}, rows, block.depth, words);
    }
    for (int64_t row = 0; Isa::kIsUnsignedB && row < rows; row += kMR) {
      const int64_t width = std::min(kMR, RoundUp(rows - row, Isa::kRowUnit));
      Isa::PutFirst(words + row * Lines(block.depth), width, Words(block.depth));
    }
  }
  JAXMP_TARGET void PackB(const KBlock<Product>& block, int64_t left, int64_t cols, char* to) const {
    auto* const words = reinterpret_cast<uint32_t*>(to);
    const auto* const b = static_cast<const int8_t*>(p.b);
    if (p.trans_b == abi::CUBLAS_OP_N) {
      PackColumnsAlong({b + left * p.ldb + block.k, p.ldb}, cols, block.depth, words);
    } else {
      PackColumnsAcross({b + block.k * p.ldb + left, p.ldb}, cols, block.depth, words);
    }
  }

  JAXMP_TARGET void Multiply(const KBlock<Product>& block, const Packed& packed, const CTile& tile) const {
    alignas(64) uint32_t sums[kMR * kNR];
    const int64_t width = std::min(kMR, RoundUp(tile.rows, Isa::kRowUnit));
    Isa::Multiply({packed.a, packed.b, width, Words(block.depth)}, sums);
    uint32_t* const c = static_cast<uint32_t*>(p.c) + tile.col * p.ldc + tile.row;
    const bool adds_now = adds || block.first > 0;
    for (int64_t col = 0; col < tile.cols; ++col) {
      const auto put = tile.rows == kMR ? Put<kMR> : Put<0>;
      put(sums + col * kMR, tile.rows, alpha, adds_now, c + col * p.ldc);
    }
  }

  // `Rows` is the number of rows if that is a constant, which takes no loop, else 0.
  template <int64_t Rows>
  JAXMP_TARGET static void Put(const uint32_t* __restrict sums, int64_t rows, uint32_t alpha, bool adds,
                               uint32_t* __restrict c) {
    const int64_t count = Rows > 0 ? Rows : rows;
    if (adds) {
      for (int64_t row = 0; row < count; ++row) c[row] += alpha * sums[row];
    } else {
      for (int64_t row = 0; row < count; ++row) c[row] = alpha * sums[row];
    }
  }

  Product p;
  uint32_t alpha;
  bool adds;
};

#undef JAXMP_INLINE
#undef JAXMP_TARGET
