// Products of few columns, where packing op(A) takes longer than multiplying it. A part of simd_gemm_impl.h.

// Multiplies few columns with op(A) = A, which is read once, in the order of memory: `Steps` k at a time for `Cols`
// columns. A number of A serves Cols products, and a sum takes Steps of them between its load and its store. AddVectors
// takes the first `rows` rows, which fill vectors, and AddRest the few that follow them.
//
// The first columns prefetch the numbers of the next `Steps` k, because they are a leading dimension further, where the
// processor does not look ahead.
template <typename From, typename T, int Steps, int Cols, bool IsFirst>
JAXMP_INLINE void AddVectors(const From* a, int64_t lda, const View<T>& b, int64_t rows, T* c, int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kLanes = Simd<T>::kLanes;
  V weights[Cols][Steps];
  for (int col = 0; col < Cols; ++col) {
    for (int k = 0; k < Steps; ++k) weights[col][k] = Simd<T>::Broadcast(*b.At(col, k).data);
  }
  for (int64_t row = 0; row < rows; row += kLanes) {
    V sums[Cols];
    for (int col = 0; col < Cols; ++col) sums[col] = Simd<T>::Load(c + col * ldc + row);
    for (int k = 0; k < Steps; ++k) {
      const V numbers = Simd<T>::Load(a + k * lda + row);
      if (IsFirst) __builtin_prefetch(a + (Steps + k) * lda + row);
      for (int col = 0; col < Cols; ++col) sums[col] = Simd<T>::Fma(numbers, weights[col][k], sums[col]);
    }
    for (int col = 0; col < Cols; ++col) Simd<T>::Store(c + col * ldc + row, sums[col]);
  }
}

template <typename From, typename T, int Steps, int Cols>
JAXMP_TARGET __attribute__((noinline)) void AddRest(const From* a, int64_t lda, const View<T>& b, int64_t rows, T* c,
                                                    int64_t ldc) {
  using V = typename Simd<T>::V;
  constexpr int kLanes = Simd<T>::kLanes;
  alignas(64) T rest[Steps][kLanes] = {}, rest_c[kLanes] = {};
  for (int k = 0; k < Steps; ++k) LoadRun(a + k * lda, rest[k], rows);
  for (int col = 0; col < Cols; ++col, c += ldc) {
    std::copy_n(c, rows, rest_c);
    V sum = Simd<T>::Load(rest_c);
    for (int k = 0; k < Steps; ++k) {
      sum = Simd<T>::Fma(Simd<T>::Load(rest[k]), Simd<T>::Broadcast(*b.At(col, k).data), sum);
    }
    Simd<T>::Store(rest_c, sum);
    std::copy_n(rest_c, rows, c);
  }
}

template <typename From, typename T, int Steps, int Cols, bool IsFirst>
JAXMP_INLINE void AddColumns(const From* a, int64_t lda, const View<T>& b, int64_t rows, T* c, int64_t ldc) {
  const int64_t whole = rows / Simd<T>::kLanes * Simd<T>::kLanes;
  if (whole > 0) AddVectors<From, T, Steps, Cols, IsFirst>(a, lda, b, whole, c, ldc);
  if (whole < rows) AddRest<From, T, Steps, Cols>(a + whole, lda, b, rows - whole, c + whole, ldc);
}

// All columns prefetch for the rest of k, which is added one at a time.
template <typename From, typename T, int Steps>
JAXMP_INLINE void AddAllColumns(const From* a, int64_t lda, const View<T>& b, int64_t rows, int64_t cols, T* c,
                                int64_t ldc) {
  constexpr int kCols = 4;
  constexpr bool kAlwaysAsks = Steps == 1;
  int64_t col = 0;
  if (cols >= kCols) {
    AddColumns<From, T, Steps, kCols, true>(a, lda, b, rows, c, ldc);
    col = kCols;
  }
  for (; col + kCols <= cols; col += kCols) {
    AddColumns<From, T, Steps, kCols, kAlwaysAsks>(a, lda, b.At(col, 0), rows, c + col * ldc, ldc);
  }
  for (; col < cols; ++col) {
    const auto add = col == 0 ? AddColumns<From, T, Steps, 1, true> : AddColumns<From, T, Steps, 1, kAlwaysAsks>;
    add(a, lda, b.At(col, 0), rows, c + col * ldc, ldc);
  }
}

// c += op(a) op(b) for the given rows and k.
template <typename From, typename T>
JAXMP_TARGET __attribute__((noinline)) void AddRows(const View<From>& a, const View<T>& b, int64_t rows, int64_t cols,
                                                    int64_t depth, T* c, int64_t ldc) {
  constexpr int64_t kSteps = 4;
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    AddAllColumns<From, T, kSteps>(a.At(0, k).data, a.ld, b.At(0, k), rows, cols, c, ldc);
  }
  for (; k < depth; ++k) AddAllColumns<From, T, 1>(a.At(0, k).data, a.ld, b.At(0, k), rows, cols, c, ldc);
}

// Widens few columns of op(B) to `to`: adjacent in k, with kKC from one column to the next.
template <typename From, typename T>
JAXMP_TARGET View<T> WidenColumns(const View<From>& b, int64_t cols, int64_t depth, T* to) {
  if (b.is_adjacent_in_k) {
    for (int64_t col = 0; col < cols; ++col) LoadRun(b.At(col, 0).data, to + col * kKC, depth);
  } else {
    T row[kSmallN];
    for (int64_t k = 0; k < depth; ++k) {
      LoadRun(b.At(0, k).data, row, cols);
      for (int64_t col = 0; col < cols; ++col) to[col * kKC + k] = row[col];
    }
  }
  return {to, kKC, true, false};
}

// The sums of a K block stay together in the L1 cache, for any leading dimension of C.
template <typename From, typename T>
JAXMP_TARGET void SmallN(const Product* segments, size_t count, T alpha, bool adds) {
  constexpr bool kIsWide = std::is_same_v<From, T>;
  alignas(64) T sums[kSmallN * kSmallNRows], columns[kIsWide ? 1 : kSmallN * kKC];
  const Product& p = *segments;
  const KBlocks<Product> blocks(segments, count, kKC);
  for (int64_t row = 0; row < p.m; row += kSmallNRows) {
    const int64_t rows = std::min(kSmallNRows, p.m - row);
    for (const KBlock<Product>& block : blocks) {
      for (int64_t col = 0; col < p.n; ++col) std::fill_n(sums + col * kSmallNRows, rows, T(0));
      for (const KSlice<Product>& slice : block) {
        const View<From> stored_b = ViewOfB<From>(slice);
        View<T> b;
        if constexpr (kIsWide) {
          b = stored_b;
        } else {
          b = WidenColumns(stored_b, p.n, slice.depth, columns);
        }
        AddRows(ViewOfA<From>(slice).At(row, 0), b, rows, p.n, slice.depth, sums, kSmallNRows);
      }
      for (int64_t col = 0; col < p.n; ++col) {
        T* const c = static_cast<T*>(p.c) + col * p.ldc + row;
        PutColumn(sums + col * kSmallNRows, rows, alpha, adds || block.first > 0, c);
      }
    }
  }
}

void SmallNGemm(abi::cudaDataType_t type, const KSegments& segments, double alpha, bool adds) {
  WithType(type, [&](auto number) {
    using From = decltype(number);
    if constexpr (kParts<From> == 1)
      SmallN<From>(segments.data(), segments.size(), static_cast<Real<From>>(alpha), adds);
  });
}

template <typename From>
void AddColumnsAs(const Product& p) {
  const KSlice<Product> whole = {&p, 0, 0, p.k};
  AddRows(ViewOfA<From>(whole), ViewOfB<float>(whole), p.m, p.n, p.k, static_cast<float*>(p.c), p.ldc);
}

void AddColumnsToC(abi::cudaDataType_t type, const Product& p) {
  if constexpr (Simd<float>::kReadsBytes) {
    if (type == abi::CUDA_R_8I) return AddColumnsAs<int8_t>(p);
    if (type == abi::CUDA_R_8U) return AddColumnsAs<uint8_t>(p);
    if (type == abi::CUDA_R_8F_E4M3) return AddColumnsAs<Float8E4m3>(p);
    if (type == abi::CUDA_R_8F_E5M2) return AddColumnsAs<Float8E5m2>(p);
  }
  AddColumnsAs<float>(p);
}
