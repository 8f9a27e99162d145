// The steps between a tile's product and D: beta*C before the product; bias, activation, aux and rounding after it.
#pragma once

#include <complex>
#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/epilog_table.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

// One tile of D with its inputs. Pointers point to the tile's first element or row.
struct Finish {
  const Epilog* epilog;
  int64_t rows, cols;
  void* z;  // accumulator type; may be d itself
  int64_t ldz;
  void* d;
  int64_t ldd;
  const void* bias;              // d's type
  void* aux;                     // RELU: the byte that holds the first row's bit. Derivatives only read aux
  int64_t aux_bit;               // RELU: the position of that bit in its byte, which other tiles may share
  int64_t aux_ld;                // bytes for RELU, elements for GELU
  int64_t aux_rows;              // `rows`; in the last tile of a column also the padding below, which is written as 0
  abi::cudaDataType_t aux_type;  // GELU: out's type or, for float sums, bf16, f16 or fp8; a derivative's is out's
  float aux_scale;               // the factor of an fp8 aux
  uint32_t* aux_amax;            // raised to the bits of an fp8 aux's largest absolute value, before the factor
};

// d = round(activation(z + bias)); aux is the sign mask or round(z + bias). A derivative: d = round(z * slope(aux)).
void FinishTile(const Finish& finish, abi::cudaDataType_t accumulator, abi::cudaDataType_t out);

// z = alpha * z. `in_double`: z has floats, and alpha may exceed their range because it is a product of scales.
void ScaleSums(void* z, int64_t ldz, int64_t rows, int64_t cols, const std::complex<double>& alpha,
               abi::cudaDataType_t accumulator, bool in_double);

// z = beta * c, or z += beta * c if `adds`. `in_double`: as above.
void ScaleC(const void* c, int64_t ldc, void* z, int64_t ldz, int64_t rows, int64_t cols,
            const std::complex<double>& beta, bool adds, abi::cudaDataType_t accumulator, abi::cudaDataType_t out,
            bool in_double);

// Calls f(accumulator, output) with numbers of the two types.
template <typename Function>
void WithTypes(abi::cudaDataType_t accumulator, abi::cudaDataType_t out, Function function) {
  WithType(Facts(out).is_16bit ? out : accumulator,
           [&](auto number) { function(Computed<decltype(number)>{}, number); });
}

}  // namespace jaxmp::hostmp
