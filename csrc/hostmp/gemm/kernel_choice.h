// Which kernel multiplies a product on this processor: decided here alone. The workspace and the products follow the
// choice, and `jaxmp info` and `jaxmp.explain` print it.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/cublasmp/abi.h"

namespace jaxmp::hostmp {

// A kernel for few columns reads op(A) = A where it lies; one of bf16 has the bits of the kernel for many columns.
enum class Kernel {
  kBlas,
  kWideningBlas,  // 16-bit numbers, widened to f32 a K block at a time
  kAmx,
  kAmxFewColumns,
  kAvx512Bf16,
  kAvx512Bf16FewColumns,
  kSimd,  // simd_gemm.h, at simd_level()
  kSimdFewColumns,
};

// What becomes of the operands, a K block at a time, before the kernel has them.
enum class Conversion { kNone, kDecoded, kDecodedFewColumns };

// What the choice depends on. In a fixed order each element is one sum, whatever the other extents are.
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
// The kernels for many and, where that is another one, for few columns of op(B).
std::string DescribeKernels(abi::cudaDataType_t type);

// k that an instruction of the kernel sums at once, and k of a K block.
int64_t KUnit(Kernel kernel);
int64_t KBlockDepth(Kernel kernel);

}  // namespace jaxmp::hostmp
