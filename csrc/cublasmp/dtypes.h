// The element types of operands, and the fixed facts about them.
#pragma once

#include <cstdint>
#include <iterator>

#include "csrc/cublasmp/abi.h"

namespace jaxmp {

// Types that hostmp multiplies, but that have no number in CUDA or no product in cuBLASMp.
namespace host_types {

constexpr int kFirst = 0x1000;  // beyond all of CUDA's
constexpr auto kS4 = static_cast<abi::cudaDataType_t>(kFirst);
constexpr auto kU4 = static_cast<abi::cudaDataType_t>(kFirst + 1);
constexpr auto kE3M4 = static_cast<abi::cudaDataType_t>(kFirst + 2);
constexpr auto kE4M3Ieee = static_cast<abi::cudaDataType_t>(kFirst + 3);
constexpr auto kE4M3B11Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 4);
constexpr auto kE4M3Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 5);
constexpr auto kE5M2Fnuz = static_cast<abi::cudaDataType_t>(kFirst + 6);
constexpr auto kE8M0 = static_cast<abi::cudaDataType_t>(kFirst + 7);

}  // namespace host_types

struct TypeFacts {
  constexpr TypeFacts(const char* name, abi::cudaDataType_t number, int64_t bits, bool is_complex = false)
      : name(name),
        number(number),
        bits(bits),
        bytes((bits + 7) / 8),
        is_complex(is_complex),
        is_16bit(bits == 16),
        is_low_precision(bits > 0 && bits <= 8) {}

  const char* name;
  abi::cudaDataType_t number;
  int64_t bits, bytes;  // 0 for an unknown type
  bool is_complex, is_16bit;
  bool is_low_precision;  // at most 8 bits; bf16 holds all of them
};

// In the order of DType, common ones first.
inline constexpr TypeFacts kDTypes[] = {{"none", abi::CUDA_R_32F, 0},
                                        {"f32", abi::CUDA_R_32F, 32},
                                        {"f64", abi::CUDA_R_64F, 64},
                                        {"bf16", abi::CUDA_R_16BF, 16},
                                        {"f16", abi::CUDA_R_16F, 16},
                                        {"c64", abi::CUDA_C_32F, 64, true},
                                        {"c128", abi::CUDA_C_64F, 128, true},
                                        {"u8", abi::CUDA_R_8U, 8},
                                        {"f8e4m3", abi::CUDA_R_8F_E4M3, 8},
                                        {"f8e5m2", abi::CUDA_R_8F_E5M2, 8},
                                        {"f4e2m1", abi::CUDA_R_4F_E2M1, 4},
                                        {"s8", abi::CUDA_R_8I, 8},
                                        {"s32", abi::CUDA_R_32I, 32},
                                        {"s4", host_types::kS4, 4},
                                        {"u4", host_types::kU4, 4},
                                        {"f8e3m4", host_types::kE3M4, 8},
                                        {"f8e4m3ieee", host_types::kE4M3Ieee, 8},
                                        {"f8e4m3b11fnuz", host_types::kE4M3B11Fnuz, 8},
                                        {"f8e4m3fnuz", host_types::kE4M3Fnuz, 8},
                                        {"f8e5m2fnuz", host_types::kE5M2Fnuz, 8},
                                        {"f8e8m0", host_types::kE8M0, 8}};

// Returns the facts of a type. An unknown type has no bytes.
constexpr const TypeFacts& Facts(abi::cudaDataType_t type) {
  size_t i = 1;
  while (i < std::size(kDTypes) && kDTypes[i].number != type) ++i;
  return kDTypes[i % std::size(kDTypes)];
}

}  // namespace jaxmp
