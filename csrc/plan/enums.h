// The words of a Problem: their names in attributes, and what cuBLASMp calls them. The index of a word is the value of
// its enumerator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/cublasmp/dtypes.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

template <typename Number>
struct Word {
  const char* name;
  Number number;
};

inline constexpr Word<const char*> kPatterns[] = {{"local", "local Matmul"},
                                                  {"all_gather", "AllGather + Matmul"},
                                                  {"reduce_scatter", "Matmul + ReduceScatter"},
                                                  {"all_reduce", "Matmul + AllReduce"},
                                                  {"grid", "generic Matmul"}};

inline constexpr Word<abi::cublasOperation_t> kOps[] = {
    {"N", abi::CUBLAS_OP_N}, {"T", abi::CUBLAS_OP_T}, {"C", abi::CUBLAS_OP_C}};

inline constexpr Word<abi::cublasComputeType_t> kComputes[] = {
    {"32F", abi::CUBLAS_COMPUTE_32F},
    {"32F_PEDANTIC", abi::CUBLAS_COMPUTE_32F_PEDANTIC},
    {"32F_FAST_TF32", abi::CUBLAS_COMPUTE_32F_FAST_TF32},
    {"32F_FAST_16BF", abi::CUBLAS_COMPUTE_32F_FAST_16BF},
    {"32F_FAST_16F", abi::CUBLAS_COMPUTE_32F_FAST_16F},
    {"32F_EMULATED_16BFX9", abi::CUBLAS_COMPUTE_32F_EMULATED_16BFX9},
    {"64F", abi::CUBLAS_COMPUTE_64F},
    {"64F_PEDANTIC", abi::CUBLAS_COMPUTE_64F_PEDANTIC},
    {"64F_EMULATED_FIXEDPOINT", abi::CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT},
    {"32I", abi::CUBLAS_COMPUTE_32I}};

inline constexpr Word<abi::cublasMpMatmulMatrixScale_t> kScaleModes[] = {
    {"none", abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32},
    {"scalar_fp32", abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32},
    {"vec16_ue4m3", abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3},
    {"vec32_ue8m0", abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0},
    {"outer_vec_fp32", abi::CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32},
    {"vec128_fp32", abi::CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32},
    {"blk128x128_fp32", abi::CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32}};

inline constexpr Word<abi::cublasMpMatmulAlgoType_t> kAlgorithms[] = {
    {"default", abi::CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT},
    {"split_p2p", abi::CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P},
    {"split_multicast", abi::CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST},
    {"atomic_p2p", abi::CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P},
    {"atomic_multicast", abi::CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST},
    {"no_overlap", abi::CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP},
    {"fused", abi::CUBLASMP_MATMUL_ALGO_TYPE_FUSED}};

constexpr const auto& WordsOf(Pattern) { return kPatterns; }
constexpr const auto& WordsOf(Op) { return kOps; }
constexpr const auto& WordsOf(DType) { return kDTypes; }
constexpr const auto& WordsOf(Compute) { return kComputes; }
constexpr const auto& WordsOf(ScaleMode) { return kScaleModes; }
constexpr const auto& WordsOf(Algorithm) { return kAlgorithms; }

template <typename Enum>
constexpr const char* NameOf(Enum value) {
  return WordsOf(value)[static_cast<size_t>(value)].name;
}

// cuBLASMp's number for it or, for a pattern, the name of the algorithm.
template <typename Enum>
constexpr auto NumberOf(Enum value) {
  return WordsOf(value)[static_cast<size_t>(value)].number;
}

constexpr int64_t BytesOf(DType dtype, int64_t count) {
  return (count * kDTypes[static_cast<size_t>(dtype)].bits + 7) / 8;
}

// True if alpha and beta are doubles.
constexpr bool IsDouble(Compute compute) {
  return compute == Compute::k64F || compute == Compute::k64FPedantic || compute == Compute::k64FEmulatedFixedPoint;
}

}  // namespace jaxmp
