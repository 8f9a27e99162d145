// The body of ordered_kernel.cc, compiled once for each instruction set: included with JAXMP_TARGET, the attribute of
// every function, and with Simd<T> in scope. k and the columns are cut into panels; a panel of op(A) is packed in
// strips of kVectors vectors of rows (at most 96 KiB), one of op(B) in strips of kCols columns, and a register tile of
// kVectors x kCols vectors of accumulators runs over the panel. Complex numbers are packed with real and imaginary
// parts apart. Rows and columns beyond the operand are packed as zeros, and what they give is dropped.

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

template <typename From>
Panel<From> panel_of_a(const Segment& segment) {
  const Product& p = *segment.part;
  const bool is_plain = p.trans_a == abi::CUBLAS_OP_N;
  return Panel<From>{static_cast<const From*>(p.a), p.lda, !is_plain, p.trans_a == abi::CUBLAS_OP_C}.from(0, segment.k);
}
template <typename From>
Panel<From> panel_of_b(const Segment& segment) {
  const Product& p = *segment.part;
  const bool is_plain = p.trans_b == abi::CUBLAS_OP_N;
  return Panel<From>{static_cast<const From*>(p.b), p.ldb, is_plain, p.trans_b == abi::CUBLAS_OP_C}.from(0, segment.k);
}

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

// `rows` rows of a segment of op(A), in strips of `Rows` rows one after another, each with room for `depth` k. Where
// rows are adjacent every k is read along all strips: long runs, for a large leading dimension puts each k on a page of
// its own.
template <int64_t Rows, typename From, typename T>
JAXMP_TARGET void pack_strips(const Segment& segment, int64_t top, int64_t rows, int64_t depth, T* to) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kParts = hostmp::kParts<From>;
  const Panel<From> panel = panel_of_a<From>(segment).from(top, 0);
  int64_t packed = 0;
  if constexpr (std::is_same_v<From, T>) {
    packed = panel.is_adjacent_in_k ? 0 : rows / Rows * Rows;
    for (int64_t k = 0; packed > 0 && k < segment.depth; ++k) {
      const T* const from = panel.from(0, k).data;
      for (int64_t row = 0; row < packed; row += Rows) {
        T* const line = to + row * depth + (segment.offset + k) * Rows;
        for (int64_t i = 0; i < Rows; i += kLanes) Simd<T>::store(line + i, Simd<T>::load(from + row + i));
      }
    }
  }
  for (; packed < rows; packed += Rows) {
    const int64_t count = std::min(Rows, rows - packed), width = round_up(count, kLanes);
    pack(panel.from(packed, 0), count, width, segment.depth, to + (packed * depth + segment.offset * width) * kParts);
  }
}

// Packed strips of `depth` k; `step_a` from one k to the next.
template <typename T>
struct Strips {
  const T* a;
  int64_t step_a;
  const T* b;
  int64_t depth;
};

// c = the product of two strips, or c += it.
template <typename T, int Vectors>
JAXMP_INLINE void multiply_strips(const Strips<T>& s, T* c, int64_t ldc, bool adds) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kCols, kLanes = Simd<T>::kLanes;
  V sums[kCols][Vectors];
  for (int col = 0; col < kCols; ++col) {
    for (int v = 0; v < Vectors; ++v) sums[col][v] = Simd<T>::broadcast(0);
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
    for (int v = 0; v < Vectors; ++v) {
      T* const to = c + col * ldc + v * kLanes;
      Simd<T>::store(to, adds ? Simd<T>::add(Simd<T>::load(to), sums[col][v]) : sums[col][v]);
    }
  }
}

// The product with real and imaginary parts apart: re += ar br; re -= ai bi; im += ar bi; im += ai br.
template <typename T>
JAXMP_INLINE void multiply_complex_strips(const Strips<T>& s, T* re, T* im, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kCols = Simd<T>::kComplexCols, kLanes = Simd<T>::kLanes;
  V real[kCols], imag[kCols];
  for (int col = 0; col < kCols; ++col) {
    real[col] = imag[col] = Simd<T>::broadcast(0);
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
  bool adds;
};

template <typename C>
JAXMP_TARGET void put_column(const C* sums, int64_t rows, bool adds, C* c) {
  for (int64_t row = 0; row < rows; ++row) c[row] = adds ? c[row] + sums[row] : sums[row];
}

template <typename T>
JAXMP_TARGET void multiply_tile(const Strips<T>& s, int vectors, const Target<T>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kRows = Simd<T>::kVectors * kLanes, kCols = Simd<T>::kCols;
  const bool is_whole = t.rows == vectors * kLanes && t.cols == kCols;
  alignas(64) T sums[kRows * kCols];
  T* const to = is_whole ? t.c : sums;
  const int64_t ld = is_whole ? t.ldc : kRows;
  const bool adds = is_whole && t.adds;
  switch (vectors) {
    case 1:
      multiply_strips<T, 1>(s, to, ld, adds);
      break;
    case 2:
      multiply_strips<T, 2>(s, to, ld, adds);
      break;
    default:
      multiply_strips<T, Simd<T>::kVectors>(s, to, ld, adds);
  }
  for (int64_t col = 0; !is_whole && col < t.cols; ++col) {
    put_column(sums + col * kRows, t.rows, t.adds, t.c + col * t.ldc);
  }
}

template <typename T>
JAXMP_TARGET void multiply_tile(const Strips<T>& s, int, const Target<std::complex<T>>& t) {
  constexpr int64_t kLanes = Simd<T>::kLanes, kCols = Simd<T>::kComplexCols;
  alignas(64) T real[kLanes * kCols], imag[kLanes * kCols];
  multiply_complex_strips<T>(s, real, imag, kLanes);
  for (int64_t col = 0; col < t.cols; ++col) {
    std::complex<T>* const c = t.c + col * t.ldc;
    for (int64_t row = 0; row < t.rows; ++row) {
      const std::complex<T> sum = {real[col * kLanes + row], imag[col * kLanes + row]};
      c[row] = t.adds ? c[row] + sum : sum;
    }
  }
}

// Few columns, op(A) = A, which is then read once, in the order in which it lies. `Steps` k at a time for `Cols`
// columns: each number of A serves Cols products, and each sum takes Steps of them between its load and its store.
template <typename T, int Steps, int Cols>
JAXMP_INLINE void add_columns(const T* a, int64_t lda, const Panel<T>& b, int64_t rows, T* c, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kLanes = Simd<T>::kLanes;
  V weights[Cols][Steps];
  for (int col = 0; col < Cols; ++col) {
    for (int k = 0; k < Steps; ++k) weights[col][k] = Simd<T>::broadcast(*b.from(col, k).data);
  }
  int64_t row = 0;
  for (; row + kLanes <= rows; row += kLanes) {
    V sums[Cols];
    for (int col = 0; col < Cols; ++col) sums[col] = Simd<T>::load(c + col * ldc + row);
    for (int k = 0; k < Steps; ++k) {
      const V numbers = Simd<T>::load(a + k * lda + row);
      for (int col = 0; col < Cols; ++col) sums[col] = Simd<T>::fma(numbers, weights[col][k], sums[col]);
    }
    for (int col = 0; col < Cols; ++col) Simd<T>::store(c + col * ldc + row, sums[col]);
  }
  if (row == rows) return;
  alignas(64) T rest[Steps][kLanes] = {}, rest_c[kLanes] = {};
  for (int k = 0; k < Steps; ++k) std::copy_n(a + k * lda + row, rows - row, rest[k]);
  for (int col = 0; col < Cols; ++col) {
    std::copy_n(c + col * ldc + row, rows - row, rest_c);
    V sum = Simd<T>::load(rest_c);
    for (int k = 0; k < Steps; ++k) sum = Simd<T>::fma(Simd<T>::load(rest[k]), weights[col][k], sum);
    Simd<T>::store(rest_c, sum);
    std::copy_n(rest_c, rows - row, c + col * ldc + row);
  }
}

template <typename T, int Steps>
JAXMP_INLINE void add_all_columns(const T* a, int64_t lda, const Panel<T>& b, int64_t rows, int64_t cols, T* c,
                                  int64_t ldc) {
  constexpr int kCols = 4;
  int64_t col = 0;
  for (; col + kCols <= cols; col += kCols) {
    add_columns<T, Steps, kCols>(a, lda, b.from(col, 0), rows, c + col * ldc, ldc);
  }
  for (; col < cols; ++col) add_columns<T, Steps, 1>(a, lda, b.from(col, 0), rows, c + col * ldc, ldc);
}

// c += op(a) op(b) for the given rows and k.
template <typename T>
JAXMP_TARGET void thin_rows(const Panel<T>& a, const Panel<T>& b, int64_t rows, int64_t cols, int64_t depth, T* c,
                            int64_t ldc) {
  constexpr int64_t kSteps = 4;
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    add_all_columns<T, kSteps>(a.from(0, k).data, a.ld, b.from(0, k), rows, cols, c, ldc);
  }
  for (; k < depth; ++k) add_all_columns<T, 1>(a.from(0, k).data, a.ld, b.from(0, k), rows, cols, c, ldc);
}

// A panel's sums stay together in the first cache, whatever C's leading dimension is.
template <typename T>
JAXMP_TARGET void thin_gemm(const Parts& parts, bool adds) {
  alignas(64) T sums[kThin * kThinRows];
  const Product& p = parts.front();
  const std::vector<KPanel> panels = panels_of(parts, kOrderedPanel);
  for (int64_t row = 0; row < p.m; row += kThinRows) {
    const int64_t rows = std::min(kThinRows, p.m - row);
    for (const KPanel& panel : panels) {
      for (int64_t col = 0; col < p.n; ++col) std::fill_n(sums + col * kThinRows, rows, T(0));
      for (const Segment& segment : panel.segments) {
        thin_rows<T>(panel_of_a<T>(segment).from(row, 0), panel_of_b<T>(segment), rows, p.n, segment.depth, sums,
                     kThinRows);
      }
      for (int64_t col = 0; col < p.n; ++col) {
        T* const c = static_cast<T*>(p.c) + col * p.ldc + row;
        put_column(sums + col * kThinRows, rows, adds || panel.begin > 0, c);
      }
    }
  }
}

template <typename From>
JAXMP_TARGET void gemm(const Parts& parts, bool adds, char* scratch) {
  using T = Real<From>;
  using C = std::conditional_t<kParts<From> == 2, std::complex<T>, T>;
  constexpr int64_t kLanes = Simd<T>::kLanes, kParts = hostmp::kParts<From>;
  constexpr int64_t kRows = kParts == 2 ? kLanes : Simd<T>::kVectors * kLanes;
  constexpr int64_t kCols = kParts == 2 ? Simd<T>::kComplexCols : Simd<T>::kCols;
  const Product& p = parts.front();
  if constexpr (std::is_same_v<From, T>) {
    if (p.n <= kThin && p.trans_a == abi::CUBLAS_OP_N) return thin_gemm<T>(parts, adds);
  }
  const std::vector<KPanel> panels = panels_of(parts, kOrderedPanel);
  T* const packed_a = reinterpret_cast<T*>(scratch);
  T* const packed_b = packed_a + rows_packed(p.m) * panels.front().depth * kParts;
  for (const KPanel& panel : panels) {
    const int64_t depth = panel.depth;
    const bool adds_panel = adds || panel.begin > 0;
    for (int64_t left = 0; left < p.n; left += kWidth) {
      const int64_t cols = std::min(kWidth, p.n - left);
      for (int64_t col = 0; col < cols; col += kCols) {
        for (const Segment& segment : panel.segments) {
          pack(panel_of_b<From>(segment).from(left + col, 0), std::min(kCols, cols - col), kCols, segment.depth,
               packed_b + (col * depth + segment.offset * kCols) * kParts);
        }
      }
      for (int64_t top = 0; top < p.m; top += kPanelRows) {
        const int64_t panel_rows = std::min(kPanelRows, p.m - top);
        for (const Segment& segment : panel.segments) {
          pack_strips<kRows, From>(segment, top, panel_rows, depth, packed_a);
        }
        for (int64_t row = 0; row < panel_rows; row += kRows) {
          const int64_t rows = std::min(kRows, panel_rows - row), width = round_up(rows, kLanes);
          const T* const strip = packed_a + row * depth * kParts;
          for (int64_t col = 0; col < cols; col += kCols) {
            const Strips<T> strips = {strip, width * kParts, packed_b + col * depth * kParts, depth};
            C* const c = static_cast<C*>(p.c) + (left + col) * p.ldc + top + row;
            multiply_tile<T>(strips, static_cast<int>(width / kLanes),
                             Target<C>{c, p.ldc, rows, std::min(kCols, cols - col), adds_panel});
          }
        }
      }
    }
  }
}

JAXMP_TARGET void dispatch(abi::cudaDataType_t type, const Parts& parts, bool adds, char* scratch) {
  switch (type) {
    case abi::CUDA_R_64F:
      return gemm<double>(parts, adds, scratch);
    case abi::CUDA_C_32F:
      return gemm<Complex64>(parts, adds, scratch);
    case abi::CUDA_C_64F:
      return gemm<Complex128>(parts, adds, scratch);
    case abi::CUDA_R_16BF:
      return gemm<BFloat16>(parts, adds, scratch);
    case abi::CUDA_R_16F:
      return gemm<Float16>(parts, adds, scratch);
    default:
      return gemm<float>(parts, adds, scratch);
  }
}

JAXMP_TARGET void dispatch_thin(abi::cudaDataType_t type, const Parts& parts, bool adds) {
  type == abi::CUDA_R_64F ? thin_gemm<double>(parts, adds) : thin_gemm<float>(parts, adds);
}

#undef JAXMP_INLINE
#undef JAXMP_TARGET
