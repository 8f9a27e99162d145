#include "csrc/hostmp/exec/epilog.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "csrc/hostmp/numeric/activations.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/low_precision.h"

namespace jaxmp::hostmp {
namespace {

// Rows finished at a time; they stay in the L1 cache.
constexpr int64_t kRowsAtOnce = 512;

template <typename From, typename To>
void Load(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy(from, from + count, to);
  } else {
    Widen(from, to, count);
  }
}
template <typename From, typename To>
void Store(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy(from, from + count, to);
  } else {
    Downconvert(from, to, count);
  }
}

template <typename T>
void Relu(T* values, int64_t count) {
  // A NaN fails the comparison and stays, as in jnp.maximum.
  for (int64_t i = 0; i < count; ++i) values[i] = values[i] < T(0) ? T(0) : values[i];
}

// Writes the lowest `count` of `bits` into the byte, starting at bit `from`. Other threads may write its other bits
// meanwhile, because tiles are cut where the ranks' parts of A are, anywhere within a byte.
void WriteBits(unsigned bits, int64_t from, int64_t count, uint8_t* byte) {
  const unsigned own = ((1u << count) - 1) << from;
  uint8_t have = __atomic_load_n(byte, __ATOMIC_RELAXED), wanted;
  do {
    wanted = static_cast<uint8_t>((have & ~own) | (bits << from & own));
  } while (!__atomic_compare_exchange_n(byte, &have, wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

template <typename T>
unsigned PositiveBits(const T* values, int64_t count) {
  unsigned bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= unsigned{values[i] > T(0)} << i;
  return bits;
}

// Sets bit row % 8 of byte row / 8 if the row's value is > 0; `values` begins with row `at`.
template <typename T>
void WriteMask(const T* values, int64_t at, int64_t count, uint8_t* mask) {
  for (int64_t i = 0; i < count;) {
    const int64_t row = at + i, held = std::min(8 - row % 8, count - i);
    if (held == 8) {
      mask[row / 8] = static_cast<uint8_t>(PositiveBits(values + i, 8));
    } else {
      WriteBits(PositiveBits(values + i, held), row % 8, held, mask + row / 8);
    }
    i += held;
  }
}

// Writes the aux of GELU in the requested type, from element `at` on.
template <typename T>
void WriteGeluAux(const Finish& f, int64_t at, const T* values, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    if (f.aux_type == abi::CUDA_R_16BF) return Store(values, static_cast<BFloat16*>(f.aux) + at, count);
    if (f.aux_type == abi::CUDA_R_16F) return Store(values, static_cast<Float16*>(f.aux) + at, count);
    if (IsFloat8(f.aux_type)) {
      float scaled[kRowsAtOnce];
      for (int64_t i = 0; i < count; ++i) *f.aux_amax = std::max(*f.aux_amax, AbsoluteBits(values[i]));
      for (int64_t i = 0; i < count; ++i) scaled[i] = f.aux_scale * values[i];
      return Encode(f.aux_type, scaled, count, static_cast<uint8_t*>(f.aux) + at);
    }
  }
  Store(values, static_cast<T*>(f.aux) + at, count);
}

// Writes the aux of some rows of a column; `values` holds z + bias.
template <typename T>
void WriteAux(const Finish& f, int64_t row, int64_t col, const T* values, int64_t count) {
  if constexpr (!IsComplex<T>::value) {
    if (f.epilog->activation == Activation::kRelu) {
      WriteMask(values, f.aux_bit + row, count, static_cast<uint8_t*>(f.aux) + col * f.aux_ld);
    } else {
      WriteGeluAux(f, col * f.aux_ld + row, values, count);
    }
  }
}

// Multiplies some rows of a column by the slope of the activation, computed from the forward pass's aux.
template <typename T, typename Out>
void MultiplyBySlope(const Finish& f, int64_t row, int64_t col, T* values, int64_t count) {
  if constexpr (!IsComplex<T>::value) {
    if (f.epilog->activation == Activation::kRelu) {
      const uint8_t* const mask = static_cast<const uint8_t*>(f.aux) + col * f.aux_ld;
      const int64_t at = f.aux_bit + row;
      for (int64_t i = 0; i < count; ++i) values[i] = mask[(at + i) / 8] >> ((at + i) % 8) & 1 ? values[i] : T(0);
    } else {
      T slope[kRowsAtOnce];
      Load(static_cast<const Out*>(f.aux) + col * f.aux_ld + row, slope, count);
      GeluSlope(slope, count);
      for (int64_t i = 0; i < count; ++i) values[i] *= slope[i];
    }
  }
}

template <typename T>
void Activate(Activation activation, T* values, int64_t count) {
  if constexpr (!IsComplex<T>::value) {
    if (activation == Activation::kRelu) Relu(values, count);
    if (activation == Activation::kGelu) Gelu(values, count);
  }
}

void PadAux(const Finish& f) {
  if (f.aux_rows <= f.rows) return;
  const bool is_mask = f.epilog->activation == Activation::kRelu;
  const int64_t rows = f.aux_bit + f.rows;
  const int64_t size = is_mask ? 1 : Facts(f.aux_type).bytes;
  const int64_t begin = is_mask ? CeilDiv(rows, 8) : f.rows;
  const int64_t end = is_mask ? CeilDiv(f.aux_bit + f.aux_rows, 8) : f.aux_rows;
  for (int64_t col = 0; col < f.cols; ++col) {
    char* const aux = static_cast<char*>(f.aux) + col * f.aux_ld * size;
    if (is_mask && rows % 8 != 0) WriteBits(0, rows % 8, 8 - rows % 8, reinterpret_cast<uint8_t*>(aux) + rows / 8);
    if (begin < end) std::memset(aux + begin * size, 0, static_cast<size_t>((end - begin) * size));
  }
}

template <typename T, typename Out>
void FinishRows(const Finish& f) {
  T values[kRowsAtOnce], bias[kRowsAtOnce];
  for (int64_t row = 0; row < f.rows; row += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, f.rows - row);
    if (f.bias) Load(static_cast<const Out*>(f.bias) + row, bias, count);
    for (int64_t col = 0; col < f.cols; ++col) {
      Load(static_cast<const T*>(f.z) + col * f.ldz + row, values, count);
      for (int64_t i = 0; f.bias && i < count; ++i) values[i] += bias[i];
      if (f.epilog->is_derivative) {
        MultiplyBySlope<T, Out>(f, row, col, values, count);
      } else {
        if (f.aux) WriteAux(f, row, col, values, count);
        Activate(f.epilog->activation, values, count);
      }
      Store(values, static_cast<Out*>(f.d) + col * f.ldd + row, count);
    }
  }
  if (f.aux && !f.epilog->is_derivative) PadAux(f);
}

template <typename T, typename Factor>
void ScaleBy(void* z, int64_t ldz, int64_t rows, int64_t cols, Factor factor) {
  for (int64_t col = 0; col < cols; ++col) {
    T* const to = static_cast<T*>(z) + col * ldz;
    for (int64_t row = 0; row < rows; ++row) to[row] = static_cast<T>(to[row] * factor);
  }
}

template <typename T, typename Out, typename Factor>
void Scale(const void* c, int64_t ldc, void* z, int64_t ldz, int64_t rows, int64_t cols, Factor beta, bool adds) {
  T values[kRowsAtOnce];
  for (int64_t col = 0; col < cols; ++col) {
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - row);
      T* const to = static_cast<T*>(z) + col * ldz + row;
      Load(static_cast<const Out*>(c) + col * ldc + row, values, count);
      for (int64_t i = 0; i < count; ++i) {
        const T term = static_cast<T>(beta * values[i]);
        to[i] = adds ? to[i] + term : term;
      }
    }
  }
}

}  // namespace

void FinishTile(const Finish& f, abi::cudaDataType_t accumulator, abi::cudaDataType_t out) {
  WithTypes(accumulator, out, [&](auto t, auto o) { FinishRows<decltype(t), decltype(o)>(f); });
}

void ScaleSums(void* z, int64_t ldz, int64_t rows, int64_t cols, const std::complex<double>& alpha,
               abi::cudaDataType_t accumulator, bool in_double) {
  if (in_double) return ScaleBy<float>(z, ldz, rows, cols, alpha.real());
  WithTypes(accumulator, accumulator, [&](auto t, auto) {
    using T = decltype(t);
    ScaleBy<T>(z, ldz, rows, cols, MakeScalar<T>(alpha));
  });
}

void ScaleC(const void* c, int64_t ldc, void* z, int64_t ldz, int64_t rows, int64_t cols,
            const std::complex<double>& beta, bool adds, abi::cudaDataType_t accumulator, abi::cudaDataType_t out,
            bool in_double) {
  if (accumulator == abi::CUDA_R_32I) {  // modulo 2^32
    const auto factor = static_cast<uint32_t>(static_cast<int64_t>(beta.real()));
    return Scale<uint32_t, uint32_t>(c, ldc, z, ldz, rows, cols, factor, adds);
  }
  WithTypes(accumulator, out, [&](auto t, auto o) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, float>) {
      if (in_double) return Scale<T, decltype(o)>(c, ldc, z, ldz, rows, cols, beta.real(), adds);
    }
    Scale<T, decltype(o)>(c, ldc, z, ldz, rows, cols, MakeScalar<T>(beta), adds);
  });
}

}  // namespace jaxmp::hostmp
