// What happens to a tile between the product and D: beta*C before it; bias, activation, aux and rounding after it.
#pragma once

#include <complex>
#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/epilog_table.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// One tile of D, and what belongs to it. Pointers are to the tile's first element or row.
struct Finish {
  const Epilog* epilog;
  int64_t rows, cols;
  void* z;  // accumulator type; may be d itself
  int64_t ldz;
  void* d;
  int64_t ldd;
  const void* bias;  // d's type
  void* aux;         // RELU: the byte with the first row's bit. Derivatives only read it
  int64_t aux_bit;   // of RELU: where that bit is in its byte, which other tiles may share
  int64_t aux_ld;    // bytes for RELU, elements for GELU
  int64_t aux_rows;  // `rows`, and in the last tile of a column also the padding below, which is written as 0
  abi::cudaDataType_t
      aux_type;        // of GELU: out's, or where the sums are floats bf16, f16 or fp8; a derivative's is out's
  float aux_scale;     // by which an aux of fp8 is multiplied
  uint32_t* aux_amax;  // raised to the bits of the largest absolute value ahead of that
};

// d = round(activation(z + bias)); aux is the sign mask or round(z + bias). A derivative: d = round(z * slope of aux).
void FinishTile(const Finish& finish, abi::cudaDataType_t accumulator, abi::cudaDataType_t out);

// z = alpha * z. `in_double`: z has floats, and alpha may leave their range, as a product of scales does.
void ScaleSums(void* z, int64_t ldz, int64_t rows, int64_t cols, const std::complex<double>& alpha,
               abi::cudaDataType_t accumulator, bool in_double);

// z = beta * c, or z += beta * c where `adds`; `in_double` as above.
void ScaleC(const void* c, int64_t ldc, void* z, int64_t ldz, int64_t rows, int64_t cols,
            const std::complex<double>& beta, bool adds, abi::cudaDataType_t accumulator, abi::cudaDataType_t out,
            bool in_double);

// f(accumulator, output) with numbers of the types.
template <typename Function>
void WithTypes(abi::cudaDataType_t accumulator, abi::cudaDataType_t out, Function function) {
  WithType(Facts(out).is_16bit ? out : accumulator,
           [&](auto number) { function(Computed<decltype(number)>{}, number); });
}

}  // namespace jaxmp::hostmp
