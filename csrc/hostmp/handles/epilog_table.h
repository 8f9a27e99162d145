// The epilogs that hostmp computes, and what each of them is made of.
#ifndef JAXMP_HOSTMP_HANDLES_EPILOG_TABLE_H_
#define JAXMP_HOSTMP_HANDLES_EPILOG_TABLE_H_

#include "csrc/cublasmp/abi.h"

namespace jaxmp::hostmp {

enum class Activation { kNone, kRelu, kGelu };

// Whose columns a bias gradient sums.
enum class Gradient { kNone, kD, kA, kB };

struct Epilog {
  int number;  // cuBLASMp's, without the ALLREDUCE bit
  const char* name;
  Activation activation;
  bool has_bias;
  bool has_aux;                // which is written, or read where the epilog is a derivative
  bool is_derivative = false;  // d = z * activation'(aux)
  Gradient gradient = Gradient::kNone;

  bool is_plain() const { return activation == Activation::kNone && !has_bias; }  // d = round(z)
};

// nullptr for an epilog that hostmp does not compute.
const Epilog* FindEpilog(int number);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_HANDLES_EPILOG_TABLE_H_
