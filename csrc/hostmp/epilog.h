// What happens to a tile between the product and D: beta*C before it; bias, activation, aux and rounding after it.
#ifndef JAXMP_HOSTMP_EPILOG_H_
#define JAXMP_HOSTMP_EPILOG_H_

#include <cstdint>

#include "csrc/cublasmp_abi.h"

namespace jaxmp::hostmp {

enum class Activation { kNone, kRelu, kGelu };

struct Epilog {
  int number;  // cuBLASMp's, without the ALLREDUCE bit
  const char* name;
  Activation activation;
  bool has_bias;
  bool has_aux;
};

// nullptr for an epilog that hostmp does not compute.
const Epilog* find_epilog(int number);

// One tile of D, and what belongs to it. Pointers are to the tile's first element or row.
struct Finish {
  const Epilog* epilog;
  int64_t rows, cols;
  void* z;  // accumulator type; may be d itself
  int64_t ldz;
  void* d;
  int64_t ldd;
  const void* bias;  // d's type
  void* aux;         // GELU: d's type. RELU: bits, and the tile starts at a multiple of 8 rows
  int64_t aux_ld;    // bytes for RELU, elements for GELU
  int64_t aux_rows;  // `rows`, and in the last tile of a column also the padding below, which is written as 0
};

// d = round(activation(z + bias)); aux is the sign mask or round(z + bias).
void finish_tile(const Finish& finish, abi::cudaDataType_t accumulator, abi::cudaDataType_t out);

// z = alpha * z.
void scale_sums(void* z, int64_t ldz, int64_t rows, int64_t cols, double alpha_real, double alpha_imag,
                abi::cudaDataType_t accumulator);

// z = beta * c, or z += beta * c where `adds`.
void scale_c(const void* c, int64_t ldc, void* z, int64_t ldz, int64_t rows, int64_t cols, double beta_real,
             double beta_imag, bool adds, abi::cudaDataType_t accumulator, abi::cudaDataType_t out);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_EPILOG_H_
