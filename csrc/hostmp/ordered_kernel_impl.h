// The body of ordered_kernel.cc, compiled once for each instruction set: included with JAXMP_TARGET, the attribute of
// every function, and with Simd<T> in scope. k and the columns are cut into panels; a panel of op(A) is packed in
// strips of kVectors vectors of rows, one of op(B) in strips of kCols columns, and a register tile of kVectors x kCols
// vectors of accumulators runs over the panel. Complex numbers are packed with real and imaginary parts apart. Rows and
// columns beyond the operand are packed as zeros, and what they give is dropped.

#define JAXMP_INLINE JAXMP_TARGET inline __attribute__((always_inline))

// op(X) as stored: `From` numbers, adjacent either along k or along the other dimension.
template <typename From>
struct Panel {
  const From* data;
  int64_t ld;
  bool is_adjacent_in_k;
  bool is_conjugated;

  Panel from(int64_t index, int64_t k) const {
    return {data + (is_adjacent_in_k ? index * ld + k : k * ld + index), ld, is_adjacent_in_k, is_conjugated};
  }
};

// Real numbers, `count` indices of `depth` numbers each: to[k * width + i]; zeros up to `width`.
template <typename From, typename T>
JAXMP_TARGET void pack_across(const Panel<From>& panel, int64_t count, int64_t width, int64_t depth, T* to) {
  for (int64_t k = 0; k < depth; ++k, to += width) {
    load_run(panel.data + k * panel.ld, to, count);
    std::fill(to + count, to + width, T(0));
  }
}

template <typename From, typename T>
JAXMP_TARGET void pack_along(const Panel<From>& panel, int64_t count, int64_t width, int64_t depth, T* to) {
  constexpr int64_t kRun = 64;
  alignas(64) T lines[4][kRun];
  for (int64_t i = 0; i < width; i += 4) {
    for (int64_t k = 0; k < depth; k += kRun) {
      const int64_t length = std::min(kRun, depth - k);
      const T* from[4];
      for (int64_t line = 0; line < 4; ++line) {
        const From* const run = panel.data + (i + line) * panel.ld + k;
        from[line] = lines[line];
        if (i + line >= count) {
          std::fill(lines[line], lines[line] + length, T(0));
        } else if constexpr (std::is_same_v<From, T>) {
          from[line] = run;
        } else {
          load_run(run, lines[line], length);
        }
      }
      transpose_lines(from, length, width, to + k * width + i);
    }
  }
}

// Complex numbers: to[k * 2 width + i] the real parts, to[k * 2 width + width + i] the imaginary ones.
template <typename T>
JAXMP_TARGET void pack_complex(const Panel<std::complex<T>>& panel, int64_t count, int64_t width, int64_t depth,
                               T* to) {
  const int64_t along_k = panel.is_adjacent_in_k ? 1 : panel.ld, along_i = panel.is_adjacent_in_k ? panel.ld : 1;
  const T sign = panel.is_conjugated ? T(-1) : T(1);
  std::fill(to, to + 2 * width * depth, T(0));
  for (int64_t i = 0; i < count; ++i) {
    const std::complex<T>* from = panel.data + i * along_i;
    for (int64_t k = 0; k < depth; ++k, from += along_k) {
      to[k * 2 * width + i] = from->real();
      to[k * 2 * width + width + i] = sign * from->imag();
    }
  }
}

template <typename From, typename T>
JAXMP_TARGET void pack(const Panel<From>& panel, int64_t count, int64_t width, int64_t depth, T* to) {
  if constexpr (kParts<From> == 2) {
    pack_complex(panel, count, width, depth, to);
  } else if (panel.is_adjacent_in_k) {
    pack_along(panel, count, width, depth, to);
  } else {
    pack_across(panel, count, width, depth, to);
  }
}

// Packed strips of `depth` k. `step_a` from one k to the next: the strip's width, or the leading dimension of an
// operand that is read where it lies.
template <typename T>
struct Strips {
  const T* a;
  int64_t step_a;
  const T* b;
  int64_t depth;
};

// sums[part][column][row], a dense block: += the product of two strips.
template <typename T, int Vectors>
JAXMP_INLINE void add_strips(const Strips<T>& s, T* c, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kCols, kLanes = Simd<T>::kLanes;
  V sums[kCols][Vectors];
  for (int col = 0; col < kCols; ++col) {
    for (int v = 0; v < Vectors; ++v) sums[col][v] = Simd<T>::load(c + col * ldc + v * kLanes);
  }
  const T* a = s.a;
  const T* b = s.b;
  for (int64_t k = 0; k < s.depth; ++k, a += s.step_a, b += kCols) {
    V rows[Vectors];
    for (int v = 0; v < Vectors; ++v) rows[v] = Simd<T>::load(a + v * kLanes);
#pragma GCC unroll 8
    for (int col = 0; col < kCols; ++col) {
      const V weight = Simd<T>::broadcast(b[col]);
      for (int v = 0; v < Vectors; ++v) sums[col][v] = Simd<T>::fma(rows[v], weight, sums[col][v]);
    }
  }
  for (int col = 0; col < kCols; ++col) {
    for (int v = 0; v < Vectors; ++v) Simd<T>::store(c + col * ldc + v * kLanes, sums[col][v]);
  }
}

// As above with real and imaginary parts apart: re += ar br; re -= ai bi; im += ar bi; im += ai br.
template <typename T>
JAXMP_INLINE void add_complex_strips(const Strips<T>& s, T* re, T* im, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kComplexCols, kLanes = Simd<T>::kLanes;
  V real[kCols], imag[kCols];
  for (int col = 0; col < kCols; ++col) {
    real[col] = Simd<T>::load(re + col * ldc);
    imag[col] = Simd<T>::load(im + col * ldc);
  }
  const T* a = s.a;
  const T* b = s.b;
  for (int64_t k = 0; k < s.depth; ++k, a += s.step_a, b += 2 * kCols) {
    const V ar = Simd<T>::load(a), ai = Simd<T>::load(a + kLanes);
#pragma GCC unroll 8
    for (int col = 0; col < kCols; ++col) {
      const V br = Simd<T>::broadcast(b[col]), bi = Simd<T>::broadcast(b[kCols + col]);
      real[col] = Simd<T>::fma(ar, br, real[col]);
      real[col] = Simd<T>::fnma(ai, bi, real[col]);
      imag[col] = Simd<T>::fma(ar, bi, imag[col]);
      imag[col] = Simd<T>::fma(ai, br, imag[col]);
    }
  }
  for (int col = 0; col < kCols; ++col) {
    Simd<T>::store(re + col * ldc, real[col]);
    Simd<T>::store(im + col * ldc, imag[col]);
  }
}

// A rectangle of C, at most one register tile.
template <typename C>
struct Target {
  C* c;
  int64_t ldc, rows, cols;
};

template <typename T>
JAXMP_TARGET void add_tile(const Strips<T>& s, int vectors, const Target<T>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kRows = Simd<T>::kVectors * kLanes, kCols = Simd<T>::kCols;
  const bool is_whole = t.rows == vectors * kLanes && t.cols == kCols;
  alignas(64) T sums[kRows * kCols];
  T* const to = is_whole ? t.c : sums;
  const int64_t ld = is_whole ? t.ldc : kRows;
  if (!is_whole) {
    std::fill(sums, sums + kRows * kCols, T(0));
    for (int64_t col = 0; col < t.cols; ++col) std::copy_n(t.c + col * t.ldc, t.rows, sums + col * kRows);
  }
  switch (vectors) {
    case 1:
      add_strips<T, 1>(s, to, ld);
      break;
    case 2:
      add_strips<T, 2>(s, to, ld);
      break;
    default:
      add_strips<T, Simd<T>::kVectors>(s, to, ld);
  }
  if (!is_whole) {
    for (int64_t col = 0; col < t.cols; ++col) std::copy_n(sums + col * kRows, t.rows, t.c + col * t.ldc);
  }
}

template <typename T>
JAXMP_TARGET void add_tile(const Strips<T>& s, int, const Target<std::complex<T>>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kCols = Simd<T>::kComplexCols;
  alignas(64) T real[kLanes * kCols] = {}, imag[kLanes * kCols] = {};
  for (int64_t col = 0; col < t.cols; ++col) {
    for (int64_t row = 0; row < t.rows; ++row) {
      real[col * kLanes + row] = t.c[col * t.ldc + row].real();
      imag[col * kLanes + row] = t.c[col * t.ldc + row].imag();
    }
  }
  add_complex_strips<T>(s, real, imag, kLanes);
  for (int64_t col = 0; col < t.cols; ++col) {
    for (int64_t row = 0; row < t.rows; ++row) {
      t.c[col * t.ldc + row] = {real[col * kLanes + row], imag[col * kLanes + row]};
    }
  }
}

// Few columns, op(A) = A: the columns of A are read once, in the order in which they lie, several k at a time.
template <typename T, int Steps>
JAXMP_INLINE void add_columns(const T* a, int64_t lda, const T* b, int64_t step_b, int64_t rows, T* c) {
  using V = typename Simd<T>::V;
  constexpr int kLanes = Simd<T>::kLanes;
  V weights[Steps];
  for (int k = 0; k < Steps; ++k) weights[k] = Simd<T>::broadcast(b[k * step_b]);
  int64_t row = 0;
  for (; row + kLanes <= rows; row += kLanes) {
    V sum = Simd<T>::load(c + row);
    for (int k = 0; k < Steps; ++k) sum = Simd<T>::fma(Simd<T>::load(a + k * lda + row), weights[k], sum);
    Simd<T>::store(c + row, sum);
  }
  if (row == rows) return;
  alignas(64) T rest[Steps + 1][kLanes] = {};
  std::copy_n(c + row, rows - row, rest[Steps]);
  V sum = Simd<T>::load(rest[Steps]);
  for (int k = 0; k < Steps; ++k) {
    std::copy_n(a + k * lda + row, rows - row, rest[k]);
    sum = Simd<T>::fma(Simd<T>::load(rest[k]), weights[k], sum);
  }
  Simd<T>::store(rest[Steps], sum);
  std::copy_n(rest[Steps], rows - row, c + row);
}

template <typename T>
JAXMP_TARGET void thin_gemm(const Product& p, const Panel<T>& a, const Panel<T>& b) {
  constexpr int64_t kSteps = 4;
  const int64_t step_b = b.is_adjacent_in_k ? 1 : b.ld;
  for (int64_t k = 0; k < p.k; k += kSteps) {
    for (int64_t col = 0; col < p.n; ++col) {
      T* const c = static_cast<T*>(p.c) + col * p.ldc;
      const T* const from = b.from(col, k).data;
      if (p.k - k >= kSteps) {
        add_columns<T, kSteps>(a.from(0, k).data, a.ld, from, step_b, p.m, c);
        continue;
      }
      for (int64_t i = k; i < p.k; ++i) add_columns<T, 1>(a.from(0, i).data, a.ld, b.from(col, i).data, step_b, p.m, c);
    }
  }
}

template <typename From>
JAXMP_TARGET void gemm(const Product& p, char* scratch) {
  using T = Real<From>;
  using C = std::conditional_t<kParts<From> == 2, std::complex<T>, T>;
  constexpr int64_t kLanes = Simd<T>::kLanes, kParts = hostmp::kParts<From>;
  constexpr int64_t kRows = kParts == 2 ? kLanes : Simd<T>::kVectors * kLanes;
  constexpr int64_t kCols = kParts == 2 ? Simd<T>::kComplexCols : Simd<T>::kCols;
  const Panel<From> a = {static_cast<const From*>(p.a), p.lda, p.trans_a != abi::CUBLAS_OP_N,
                         p.trans_a == abi::CUBLAS_OP_C};
  const Panel<From> b = {static_cast<const From*>(p.b), p.ldb, p.trans_b == abi::CUBLAS_OP_N,
                         p.trans_b == abi::CUBLAS_OP_C};
  if constexpr (std::is_same_v<From, T>) {
    if (p.n <= kThin && !a.is_adjacent_in_k) return thin_gemm(p, a, b);
  }
  T* const strip_a = reinterpret_cast<T*>(scratch);
  T* const packed_b = strip_a + kStripRows * kDepth * kParts;
  for (int64_t at = 0; at < p.k; at += kDepth) {
    const int64_t depth = std::min(kDepth, p.k - at);
    for (int64_t left = 0; left < p.n; left += kWidth) {
      const int64_t cols = std::min(kWidth, p.n - left);
      for (int64_t col = 0; col < cols; col += kCols) {
        pack(b.from(left + col, at), std::min(kCols, cols - col), kCols, depth, packed_b + col * depth * kParts);
      }
      for (int64_t row = 0; row < p.m; row += kRows) {
        const int64_t rows = std::min(kRows, p.m - row), width = round_up(rows, kLanes);
        pack(a.from(row, at), rows, width, depth, strip_a);
        const int vectors = static_cast<int>(width / kLanes);
        for (int64_t col = 0; col < cols; col += kCols) {
          const Strips<T> strips = {strip_a, width * kParts, packed_b + col * depth * kParts, depth};
          C* const c = static_cast<C*>(p.c) + (left + col) * p.ldc + row;
          add_tile<T>(strips, vectors, Target<C>{c, p.ldc, rows, std::min(kCols, cols - col)});
        }
      }
    }
  }
}

JAXMP_TARGET void dispatch(abi::cudaDataType_t type, const Product& p, char* scratch) {
  switch (type) {
    case abi::CUDA_R_64F:
      return gemm<double>(p, scratch);
    case abi::CUDA_C_32F:
      return gemm<Complex64>(p, scratch);
    case abi::CUDA_C_64F:
      return gemm<Complex128>(p, scratch);
    case abi::CUDA_R_16BF:
      return gemm<BFloat16>(p, scratch);
    case abi::CUDA_R_16F:
      return gemm<Float16>(p, scratch);
    default:
      return gemm<float>(p, scratch);
  }
}

#undef JAXMP_INLINE
#undef JAXMP_TARGET
