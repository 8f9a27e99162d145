// The epilogs that hostmp computes, and their parts.
#pragma once

#include "csrc/cublasmp/abi.h"

namespace jaxmp::hostmp {

enum class Activation { kNone, kRelu, kGelu };

// The matrix that a bias gradient sums over its columns.
enum class Gradient { kNone, kD, kA, kB };

struct Epilog {
  int number;  // cuBLASMp's, without the ALLREDUCE bit
  const char* name;
  Activation activation;
  bool has_bias;
  bool has_aux;                // written, or read if the epilog is a derivative
  bool is_derivative = false;  // d = z * activation'(aux)
  Gradient gradient = Gradient::kNone;

  bool is_plain() const { return activation == Activation::kNone && !has_bias; }  // d = round(z)
};

inline constexpr Epilog kEpilogs[] = {
    {abi::CUBLASMP_MATMUL_EPILOGUE_DEFAULT, "DEFAULT", Activation::kNone, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BIAS, "BIAS", Activation::kNone, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU, "RELU", Activation::kRelu, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_BIAS, "RELU_BIAS", Activation::kRelu, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, "RELU_AUX", Activation::kRelu, false, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_RELU_AUX_BIAS, "RELU_AUX_BIAS", Activation::kRelu, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU, "GELU", Activation::kGelu, false, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_BIAS, "GELU_BIAS", Activation::kGelu, true, false},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_AUX, "GELU_AUX", Activation::kGelu, false, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_GELU_AUX_BIAS, "GELU_AUX_BIAS", Activation::kGelu, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DRELU, "DRELU", Activation::kRelu, false, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD, "DRELU_BGRAD", Activation::kRelu, false, true, true, Gradient::kD},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DGELU, "DGELU", Activation::kGelu, false, true, true},
    {abi::CUBLASMP_MATMUL_EPILOGUE_DGELU_BGRAD, "DGELU_BGRAD", Activation::kGelu, false, true, true, Gradient::kD},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BGRADA, "BGRADA", Activation::kNone, false, false, false, Gradient::kA},
    {abi::CUBLASMP_MATMUL_EPILOGUE_BGRADB, "BGRADB", Activation::kNone, false, false, false, Gradient::kB},
};

// Returns nullptr for an epilog that hostmp does not compute.
inline const Epilog* FindEpilog(int number) {
  for (const Epilog& epilog : kEpilogs) {
    if (epilog.number == number) return &epilog;
  }
  return nullptr;
}

}  // namespace jaxmp::hostmp
