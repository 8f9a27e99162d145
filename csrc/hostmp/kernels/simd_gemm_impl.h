// The kernels of an instruction set, included into its file after simd_kernels.h, JAXMP_TARGET (the attribute of every
// function) and Simd<T>. op(A) is packed in micro-panels of kVectors vectors of rows (at most 96 KiB), op(B) in
// micro-panels of kCols columns, and a register tile of kVectors x kCols vectors of accumulators runs over a K block.
// Numbers of op(B) that are adjacent in k are read in place instead. Complex numbers are packed with separate real and
// imaginary parts. Rows and columns beyond the operand are packed as zeros, and their results are dropped.

#define JAXMP_INLINE JAXMP_TARGET inline __attribute__((always_inline))

// op(X) as stored: `From` numbers, adjacent either along k or along the other dimension.
template <typename From>
struct View {
  const From* data;
  int64_t ld;
  bool is_adjacent_in_k;
  bool is_conjugated;

  View At(int64_t index, int64_t k) const {
    return {data + (is_adjacent_in_k ? index * ld + k : k * ld + index), ld, is_adjacent_in_k, is_conjugated};
  }
};

template <typename From>
View<From> ViewOfA(const KSlice<Product>& slice) {
  const Product& p = *slice.segment;
  const bool is_plain = p.trans_a == abi::CUBLAS_OP_N;
  return View<From>{static_cast<const From*>(p.a), p.lda, !is_plain, p.trans_a == abi::CUBLAS_OP_C}.At(0, slice.k);
}
template <typename From>
View<From> ViewOfB(const KSlice<Product>& slice) {
  const Product& p = *slice.segment;
  const bool is_plain = p.trans_b == abi::CUBLAS_OP_N;
  return View<From>{static_cast<const From*>(p.b), p.ldb, is_plain, p.trans_b == abi::CUBLAS_OP_C}.At(0, slice.k);
}

template <typename From, typename T>
JAXMP_INLINE void LoadRun(const From* from, T* to, int64_t count) {
  if constexpr (std::is_same_v<From, T>) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  } else {
    constexpr int64_t kLanes = Simd<T>::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) Simd<T>::Store(to + i, Simd<T>::Load(from + i));
    if (i < count) Widen(from + i, to + i, count - i);
  }
}

// Packs real numbers, `depth` of each of `count` indices: to[k * width + i]; zeros up to `width`.
//
// Inlined, so that `width` is a constant.
template <typename From, typename T>
JAXMP_INLINE void PackAcross(const View<From>& view, int64_t count, int64_t width, int64_t depth, T* to) {
  if (count == width) {  // a copy of constant size, which takes no call
    for (int64_t k = 0; k < depth; ++k, to += width) LoadRun(view.data + k * view.ld, to, width);
    return;
  }
  for (int64_t k = 0; k < depth; ++k, to += width) {
    LoadRun(view.data + k * view.ld, to, count);
    std::fill(to + count, to + width, T(0));
  }
}

// Prefetches the lines that follow: they are a leading dimension further, which the processor does not prefetch by
// itself. A prefetch from beyond the operand does nothing.
template <typename From, typename T>
JAXMP_INLINE void PackAlong(const View<From>& view, int64_t count, int64_t width, int64_t depth, T* to) {
  constexpr int64_t kRun = 64, kLines = 8, kTransposed = Simd<T>::kTransposed;
  alignas(64) T lines[kLines][kRun];
  for (int64_t i = 0; i < width; i += kLines) {
    const int64_t group = std::min(kLines, width - i);
    for (int64_t k = 0; k < depth; k += kRun) {
      const int64_t length = std::min(kRun, depth - k);
      const T* from[kLines];
      for (int64_t line = 0; line < group; ++line) {
        const From* const run = view.data + (i + line) * view.ld + k;
        for (int64_t ahead = 0; ahead < length; ahead += 64 / static_cast<int64_t>(sizeof(From))) {
          __builtin_prefetch(run + kLines * view.ld + ahead);
        }
        from[line] = lines[line];
        if (i + line >= count) {
          std::fill(lines[line], lines[line] + length, T(0));
        } else if constexpr (std::is_same_v<From, T>) {
          from[line] = run;
        } else {
          LoadRun(run, lines[line], length);
        }
      }
      T* packed = to + k * width + i;
      int64_t done = 0;
      if constexpr (kTransposed > 0) {
        for (; group == kLines && done + kTransposed <= length; done += kTransposed, packed += kTransposed * width) {
          Simd<T>::Transpose(from, width, packed);
          for (const T*& line : from) line += kTransposed;
        }
      }
      for (int64_t line = 0; line < group; line += 4) TransposeLines(from + line, length - done, width, packed + line);
    }
  }
}

// Packs complex numbers: to[k * 2 width + i] are the real parts, to[k * 2 width + width + i] the imaginary ones.
template <typename T>
JAXMP_TARGET void PackComplex(const View<std::complex<T>>& view, int64_t count, int64_t width, int64_t depth, T* to) {
  const int64_t along_k = view.is_adjacent_in_k ? 1 : view.ld, along_i = view.is_adjacent_in_k ? view.ld : 1;
  const T sign = view.is_conjugated ? T(-1) : T(1);
  std::fill(to, to + 2 * width * depth, T(0));
  for (int64_t i = 0; i < count; ++i) {
    const std::complex<T>* from = view.data + i * along_i;
    for (int64_t k = 0; k < depth; ++k, from += along_k) {
      to[k * 2 * width + i] = from->real();
      to[k * 2 * width + width + i] = sign * from->imag();
    }
  }
}

template <typename From, typename T>
JAXMP_INLINE void Pack(const View<From>& view, int64_t count, int64_t width, int64_t depth, T* to) {
  if constexpr (kParts<From> == 2) {
    PackComplex(view, count, width, depth, to);
  } else if (view.is_adjacent_in_k) {
    PackAlong(view, count, width, depth, to);
  } else {
    PackAcross(view, count, width, depth, to);
  }
}

// Packs `rows` rows of a slice of op(A), in micro-panels of `Rows` rows one after another, with room for `depth` k in a
// panel. If rows are adjacent, every k is read along all panels: long runs, because a large leading dimension puts each
// k on another page, where the processor does not look ahead.
template <int64_t Rows, typename From, typename T>
JAXMP_TARGET void PackRows(const KSlice<Product>& slice, int64_t top, int64_t rows, int64_t depth, T* to) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kParts = hostmp::kParts<From>, kAhead = 4;
  const View<From> view = ViewOfA<From>(slice).At(top, 0);
  int64_t packed = 0;
  if constexpr (kParts == 1) {
    packed = view.is_adjacent_in_k ? 0 : rows / Rows * Rows;
    for (int64_t k = 0; packed > 0 && k < slice.depth; ++k) {
      const From* const from = view.At(0, k).data;
      for (int64_t row = 0; row < packed; row += Rows) {
        T* const line = to + row * depth + (slice.offset + k) * Rows;
        for (int64_t i = 0; i < Rows; i += kLanes) {
          __builtin_prefetch(from + kAhead * view.ld + row + i);
          Simd<T>::Store(line + i, Simd<T>::Load(from + row + i));
        }
      }
    }
  }
  for (; packed < rows; packed += Rows) {
    const int64_t count = std::min(Rows, rows - packed), width = RoundUp(count, kLanes);
    Pack(view.At(packed, 0), count, width, slice.depth, to + (packed * depth + slice.offset * width) * kParts);
  }
}

// Two micro-panels of `depth` k: of op(A), packed, with `step_a` from one k to the next; and of op(B), packed, or in
// columns of leading dimension `ldb`.
template <typename T>
struct MicroPanels {
  const T* a;
  int64_t step_a;
  const T* b;
  int64_t ldb;  // 0: packed
  int64_t depth;
};

// c = alpha times the product of two micro-panels, or c += it if `adds`.
template <typename T, int Vectors, bool IsBPacked>
JAXMP_INLINE void MultiplyMicroPanels(const MicroPanels<T>& s, T alpha, T* c, int64_t ldc, bool adds) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kCols, kLanes = Simd<T>::kLanes;
  V sums[kCols][Vectors];
  for (int col = 0; col < kCols; ++col) {
    for (int v = 0; v < Vectors; ++v) {
      sums[col][v] = Simd<T>::Broadcast(0);
      __builtin_prefetch(c + col * ldc + v * kLanes, 1);  // c is read or written when the sums are ready
    }
  }
  constexpr int64_t kHalf = kCols / 2, kStep = IsBPacked ? kCols : 1;
  const int64_t ldb = IsBPacked ? 1 : s.ldb;
  const T* a = s.a;
  const T* b[2] = {s.b, s.b + kHalf * ldb};  // an address mode reaches four columns from each
  for (int64_t k = 0; k < s.depth; ++k, a += s.step_a, b[0] += kStep, b[1] += kStep) {
    V rows[Vectors];
    for (int v = 0; v < Vectors; ++v) rows[v] = Simd<T>::Load(a + v * kLanes);
#pragma GCC unroll 8
    for (int col = 0; col < kCols; ++col) {
      const V weight = Simd<T>::Broadcast(b[col / kHalf][col % kHalf * ldb]);
      for (int v = 0; v < Vectors; ++v) sums[col][v] = Simd<T>::Fma(rows[v], weight, sums[col][v]);
    }
  }
  const V factor = Simd<T>::Broadcast(alpha);
  for (int col = 0; col < kCols; ++col) {
    for (int v = 0; v < Vectors; ++v) {
      T* const to = c + col * ldc + v * kLanes;
      const V term = sums[col][v] * factor;
      Simd<T>::Store(to, adds ? Simd<T>::Load(to) + term : term);
    }
  }
}

template <typename T, int Vectors>
JAXMP_INLINE void MultiplyMicroPanels(const MicroPanels<T>& s, T alpha, T* c, int64_t ldc, bool adds) {
  s.ldb == 0 ? MultiplyMicroPanels<T, Vectors, true>(s, alpha, c, ldc, adds)
             : MultiplyMicroPanels<T, Vectors, false>(s, alpha, c, ldc, adds);
}

// Multiplies with separate real and imaginary parts: re += ar br; re -= ai bi; im += ar bi; im += ai br.
template <typename T>
JAXMP_INLINE void MultiplyComplexMicroPanels(const MicroPanels<T>& s, T* re, T* im, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kComplexCols, kLanes = Simd<T>::kLanes;
  V real[kCols], imag[kCols];
  for (int col = 0; col < kCols; ++col) {
    real[col] = imag[col] = Simd<T>::Broadcast(0);
  }
  const T* a = s.a;
  const T* b = s.b;
  for (int64_t k = 0; k < s.depth; ++k, a += s.step_a, b += 2 * kCols) {
    const V ar = Simd<T>::Load(a), ai = Simd<T>::Load(a + kLanes);
#pragma GCC unroll 8
    for (int col = 0; col < kCols; ++col) {
      const V br = Simd<T>::Broadcast(b[col]), bi = Simd<T>::Broadcast(b[kCols + col]);
      real[col] = Simd<T>::Fma(ar, br, real[col]);
      real[col] = Simd<T>::Fnma(ai, bi, real[col]);
      imag[col] = Simd<T>::Fma(ar, bi, imag[col]);
      imag[col] = Simd<T>::Fma(ai, br, imag[col]);
    }
  }
  for (int col = 0; col < kCols; ++col) {
    Simd<T>::Store(re + col * ldc, real[col]);
    Simd<T>::Store(im + col * ldc, imag[col]);
  }
}

// A rectangle of C, at most one register tile.
template <typename T, typename C>
struct Destination {
  C* c;
  int64_t ldc, rows, cols;
  T alpha;
  bool adds;
};

template <typename T, typename C>
JAXMP_TARGET void PutColumn(const C* sums, int64_t rows, T alpha, bool adds, C* c) {
  for (int64_t row = 0; row < rows; ++row) {
    const C term = alpha * sums[row];
    c[row] = adds ? c[row] + term : term;
  }
}

template <typename T>
JAXMP_TARGET void MultiplyTile(const MicroPanels<T>& s, int vectors, const Destination<T, T>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kRows = Simd<T>::kVectors * kLanes, kCols = Simd<T>::kCols;
  const bool is_whole = t.rows == vectors * kLanes && t.cols == kCols;
  alignas(64) T sums[kRows * kCols];
  T* const to = is_whole ? t.c : sums;
  const T alpha = is_whole ? t.alpha : 1;
  const int64_t ld = is_whole ? t.ldc : kRows;
  const bool adds = is_whole && t.adds;
  switch (vectors) {
    case 1:
      MultiplyMicroPanels<T, 1>(s, alpha, to, ld, adds);
      break;
    case 2:
      MultiplyMicroPanels<T, 2>(s, alpha, to, ld, adds);
      break;
    default:
      MultiplyMicroPanels<T, Simd<T>::kVectors>(s, alpha, to, ld, adds);
  }
  for (int64_t col = 0; !is_whole && col < t.cols; ++col) {
    PutColumn(sums + col * kRows, t.rows, t.alpha, t.adds, t.c + col * t.ldc);
  }
}

template <typename T>
JAXMP_TARGET void MultiplyTile(const MicroPanels<T>& s, int, const Destination<T, std::complex<T>>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kCols = Simd<T>::kComplexCols;
  alignas(64) T real[kLanes * kCols], imag[kLanes * kCols];
  MultiplyComplexMicroPanels<T>(s, real, imag, kLanes);
  for (int64_t col = 0; col < t.cols; ++col) {
    std::complex<T>* const c = t.c + col * t.ldc;
    for (int64_t row = 0; row < t.rows; ++row) {
      const std::complex<T> term = t.alpha * std::complex<T>(real[col * kLanes + row], imag[col * kLanes + row]);
      c[row] = t.adds ? c[row] + term : term;
    }
  }
}

#include "csrc/hostmp/kernels/simd_small_n_impl.h"

template <typename From>
struct Kernel {
  using T = Real<From>;
  static constexpr int64_t kParts = hostmp::kParts<From>, kLanes = Simd<T>::kLanes;
  static constexpr int64_t kKC = kPackedK, kMC = hostmp::kMC, kNC = hostmp::kNC;
  static constexpr bool kReusesB = true;  // its micro-panel has at most 16 KiB of f32, op(A)'s has 96 KiB
  static constexpr int64_t kMR = kParts == 2 ? kLanes : Simd<T>::kVectors * kLanes;
  static constexpr int64_t kNR = kParts == 2 ? Simd<T>::kComplexCols : Simd<T>::kCols;
  static_assert(kMC % kMR == 0 && kNC % kNR == 0);

  int64_t ABytes(int64_t rows, int64_t depth) const { return bytes(RoundUp(rows, kLanes) * depth); }
  int64_t BBytes(int64_t cols, int64_t depth) const { return bytes(RoundUp(cols, kNR) * depth); }
  int64_t OwnBytes(int64_t, int64_t, int64_t) const { return 0; }

  JAXMP_TARGET void PackA(const KBlock<Product>& block, int64_t top, int64_t rows, char* to) const {
    for (const KSlice<Product>& slice : block) {
      PackRows<kMR, From>(slice, top, rows, block.depth, reinterpret_cast<T*>(to));
    }
  }
  // True for whole micro-panels of stored numbers, adjacent in k, with the K block in one segment.
  bool ReadsBInPlace(const KBlock<Product>& block, int64_t cols) const {
    const bool is_plain = std::is_same_v<From, T> && p.trans_b == abi::CUBLAS_OP_N;
    return is_plain && cols >= kNR && block.k + block.depth <= block.segment->k;
  }
  JAXMP_TARGET void PackB(const KBlock<Product>& block, int64_t left, int64_t cols, char* to) const {
    for (int64_t col = 0; col < cols; col += kNR) {
      if (ReadsBInPlace(block, cols - col)) continue;
      for (const KSlice<Product>& slice : block) {
        Pack(ViewOfB<From>(slice).At(left + col, 0), std::min(kNR, cols - col), kNR, slice.depth,
             reinterpret_cast<T*>(to) + (col * block.depth + slice.offset * kNR) * kParts);
      }
    }
  }
  JAXMP_TARGET void Multiply(const KBlock<Product>& block, const Packed& packed, const CTile& tile) const {
    using C = std::conditional_t<kParts == 2, std::complex<T>, T>;
    const int64_t width = RoundUp(tile.rows, kLanes);
    MicroPanels<T> panels = {reinterpret_cast<const T*>(packed.a), width * kParts, reinterpret_cast<const T*>(packed.b),
                             0, block.depth};
    if (ReadsBInPlace(block, tile.cols)) {
      panels.b = static_cast<const T*>(block.segment->b) + tile.col * block.segment->ldb + block.k;
      panels.ldb = block.segment->ldb;
    }
    C* const c = static_cast<C*>(p.c) + tile.col * p.ldc + tile.row;
    const int64_t step_b = panels.ldb == 0 ? kNR * kParts : 1;
    for (int64_t k = 0; k < block.depth; k += hostmp::kKC) {
      panels.depth = std::min(hostmp::kKC, block.depth - k);
      MultiplyTile<T>(panels, static_cast<int>(width / kLanes),
                      Destination<T, C>{c, p.ldc, tile.rows, tile.cols, alpha, adds || block.first + k > 0});
      panels.a += hostmp::kKC * panels.step_a;
      panels.b += hostmp::kKC * step_b;
    }
  }

  static int64_t bytes(int64_t numbers) { return numbers * kParts * static_cast<int64_t>(sizeof(T)); }

  Product p;
  T alpha;
  bool adds;
};

void Gemm(abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds, char* scratch) {
  WithType(type, [&](auto number) {
    using From = decltype(number);
    BlockedGemm(Kernel<From>{segments.front(), static_cast<Real<From>>(alpha), adds}, segments, scratch);
  });
}

int64_t ScratchBytes(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  int64_t bytes = 0;
  WithType(type, [&](auto number) { bytes = ScratchOf(Kernel<decltype(number)>{}, m, n, k).bytes(); });
  return bytes;
}

constexpr SimdKernels kKernels = {Gemm, ScratchBytes, SmallNGemm, AddColumnsToC};
