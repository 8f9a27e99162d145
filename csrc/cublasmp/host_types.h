// Types of operands that hostmp multiplies and CUDA has no number for, or cuBLASMp no product of.
#ifndef JAXMP_CUBLASMP_HOST_TYPES_H_
#define JAXMP_CUBLASMP_HOST_TYPES_H_

#include "csrc/cublasmp/abi.h"

namespace jaxmp::host_types {

constexpr int kFirst = 0x1000;  // beyond all of CUDA's
constexpr auto kS4 = static_cast<abi::cudaDataType_t>(kFirst);
constexpr auto kU4 = static_cast<abi::cudaDataType_t>(kFirst + 1);
constexpr auto kE3M4 = static_cast<abi::cudaDataType_t>(kFirst + 2);
constexpr auto kE4M3Ieee = static_cast<abi::cudaDataType_t>(kFirst + 3);
constexpr auto kE4M3B11Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 4);
constexpr auto kE4M3Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 5);
constexpr auto kE5M2Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 6);
constexpr auto kE8M0 = static_cast<abi::cudaDataType_t>(kFirst + 7);

}  // namespace jaxmp::host_types

#endif  // JAXMP_CUBLASMP_HOST_TYPES_H_
