// The element types that hostmp computes with, and what is fixed by each.
#ifndef JAXMP_HOSTMP_NUMERIC_DTYPES_H_
#define JAXMP_HOSTMP_NUMERIC_DTYPES_H_

#include <complex>
#include <cstdint>
#include <string>

#include "csrc/cublasmp/abi.h"
#include "csrc/cublasmp/host_types.h"

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

struct TypeFacts {
  const char* name;
  int64_t bytes;  // 0 for a type that hostmp does not know
  bool is_complex;
  bool is_16bit;
  bool is_low_precision = false;  // at most 8 bits: decoded before any computation; bf16 holds all of them
  int64_t bits = 8 * bytes;
};

constexpr TypeFacts Facts(abi::cudaDataType_t type) {
  switch (static_cast<int>(type)) {  // not all are of the enumeration
    case abi::CUDA_R_32F:
      return {"f32", 4, false, false};
    case abi::CUDA_R_64F:
      return {"f64", 8, false, false};
    case abi::CUDA_C_32F:
      return {"c64", 8, true, false};
    case abi::CUDA_C_64F:
      return {"c128", 16, true, false};
    case abi::CUDA_R_16BF:
      return {"bf16", 2, false, true};
    case abi::CUDA_R_16F:
      return {"f16", 2, false, true};
    case abi::CUDA_R_8F_E4M3:
      return {"f8e4m3", 1, false, false, true};
    case abi::CUDA_R_8F_E5M2:
      return {"f8e5m2", 1, false, false, true};
    case abi::CUDA_R_4F_E2M1:
      return {"f4e2m1", 1, false, false, true, 4};
    case abi::CUDA_R_8I:
      return {"s8", 1, false, false, true};
    case abi::CUDA_R_8U:
      return {"u8", 1, false, false, true};
    case host_types::kS4:
      return {"s4", 1, false, false, true, 4};
    case host_types::kU4:
      return {"u4", 1, false, false, true, 4};
    case host_types::kE3M4:
      return {"f8e3m4", 1, false, false, true};
    case host_types::kE4M3Ieee:
      return {"f8e4m3ieee", 1, false, false, true};
    case host_types::kE4M3B11Fnuz:
      return {"f8e4m3b11fnuz", 1, false, false, true};
    case host_types::kE4M3Fnuz:
      return {"f8e4m3fnuz", 1, false, false, true};
    case host_types::kE5M2Fnuz:
      return {"f8e5m2fnuz", 1, false, false, true};
    case host_types::kE8M0:
      return {"f8e8m0", 1, false, false, true};
    case abi::CUDA_R_32I:
      return {"s32", 4, false, false};
    default:
      return {"unsupported", 0, false, false};
  }
}

inline std::string NameOf(abi::cudaDataType_t type) {
  if (Facts(type).bytes != 0) return Facts(type).name;
  return "data type " + std::to_string(static_cast<int>(type));
}

// The type in which products are summed, and of alpha and beta: what cuBLAS calls the scale type.
constexpr abi::cudaDataType_t AccumulatorOf(abi::cudaDataType_t operand) {
  if (operand == abi::CUDA_R_8I) return abi::CUDA_R_32I;
  return Facts(operand).is_16bit || Facts(operand).is_low_precision ? abi::CUDA_R_32F : operand;
}

constexpr bool IsFloat8(abi::cudaDataType_t type) { return type == abi::CUDA_R_8F_E4M3 || type == abi::CUDA_R_8F_E5M2; }
// What takes scales: fp8 and fp4.
constexpr bool IsScaled(abi::cudaDataType_t type) { return IsFloat8(type) || type == abi::CUDA_R_4F_E2M1; }

constexpr int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

constexpr int64_t CeilDiv(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Bytes of `count` adjacent elements.
constexpr int64_t BytesOf(abi::cudaDataType_t type, int64_t count) { return CeilDiv(count * Facts(type).bits, 8); }

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_NUMERIC_DTYPES_H_
