// Chooses the kernel that multiplies a product on this processor; it is decided only here. The workspace and the
// products follow the choice, and `jaxmp info` and `jaxmp.explain` print it.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/cublasmp/abi.h"

namespace jaxmp::hostmp {

// A kernel for few columns reads op(A) = A in place; for bf16 it has the bits of the kernel for many columns.
enum class Kernel {
  kBlas,
  kWideningBlas,  // 16-bit numbers, widened to f32 one K block at a time
  kAmx,
  kAmxFewColumns,
  kAvx512Bf16,
  kAvx512Bf16FewColumns,
  kSimd,  // simd_gemm.h, at simd_level()
  kSimdFewColumns,
  kInt8,  // int8_gemm.h, at int8_level()
};

// The conversion of operands, one K block at a time, before the kernel gets them.
enum class Conversion { kNone, kDecoded, kDecodedFewColumns };

// Everything that the choice depends on. In a fixed order an element is one sum that the other extents do not change.
struct ProductKind {
  abi::cudaDataType_t a, b;
  abi::cublasOperation_t trans_a;
  int64_t n;
  bool is_fixed_order;
  bool is_alpha_one;  // while k is summed
};

struct KernelChoice {
  Kernel kernel;
  abi::cudaDataType_t type;  // of the numbers that the kernel multiplies
  Conversion conversion = Conversion::kNone;
};

KernelChoice KernelOf(const ProductKind& product);

std::string Describe(const KernelChoice& choice);
// Describes the kernel for many columns of op(B) and, if it is another one, the kernel for few.
std::string DescribeKernels(abi::cudaDataType_t type);

// The k that one instruction of the kernel sums, and the k of a K block.
int64_t KUnit(Kernel kernel);
int64_t KBlockDepth(Kernel kernel);

}  // namespace jaxmp::hostmp
