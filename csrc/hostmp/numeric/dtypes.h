// How hostmp computes with element types.
#pragma once

#include <complex>
#include <cstdint>
#include <string>
#include <type_traits>

#include "csrc/cublasmp/abi.h"
#include "csrc/cublasmp/dtypes.h"

namespace jaxmp::hostmp {

// 16-bit numbers are storage: they are widened to float before anything is computed.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

using Complex64 = std::complex<float>;
using Complex128 = std::complex<double>;

// The type that is used to compute with numbers of type T.
template <typename T>
using Computed = std::conditional_t<std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>, float, T>;

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <typename T>
T MakeScalar(const std::complex<double>& value) {
  if constexpr (IsComplex<T>::value) {
    return T(value);
  } else {
    return static_cast<T>(value.real());
  }
}

// Calls f(number) with a number of the type; with a float for all types that have no case here.
template <typename Function>
void WithType(abi::cudaDataType_t type, Function function) {
  switch (type) {
    case abi::CUDA_R_64F:
      return function(double{});
    case abi::CUDA_C_32F:
      return function(Complex64{});
    case abi::CUDA_C_64F:
      return function(Complex128{});
    case abi::CUDA_R_16BF:
      return function(BFloat16{});
    case abi::CUDA_R_16F:
      return function(Float16{});
    default:
      return function(float{});
  }
}

using jaxmp::Facts;

inline std::string NameOf(abi::cudaDataType_t type) {
  if (Facts(type).bytes != 0) return Facts(type).name;
  return "data type " + std::to_string(static_cast<int>(type));
}

// The type of sums, alpha and beta; cuBLAS calls it the scale type.
constexpr abi::cudaDataType_t AccumulatorOf(abi::cudaDataType_t operand) {
  if (operand == abi::CUDA_R_8I) return abi::CUDA_R_32I;
  return Facts(operand).is_16bit || Facts(operand).is_low_precision ? abi::CUDA_R_32F : operand;
}

constexpr bool IsFloat8(abi::cudaDataType_t type) { return type == abi::CUDA_R_8F_E4M3 || type == abi::CUDA_R_8F_E5M2; }
// True for the types that take scales: fp8 and fp4.
constexpr bool IsScaled(abi::cudaDataType_t type) { return IsFloat8(type) || type == abi::CUDA_R_4F_E2M1; }

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr int64_t CeilDiv(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Bytes of `count` adjacent elements.
constexpr int64_t BytesOf(abi::cudaDataType_t type, int64_t count) { return CeilDiv(count * Facts(type).bits, 8); }

}  // namespace jaxmp::hostmp
