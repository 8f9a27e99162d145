// Products of numbers of 8 bits and fewer, with each other or beside a wider operand. K blocks of both operands are
// decoded to bf16, which holds all of them and their products with block scales, and multiplied by the 16-bit kernels;
// or to f32, beside an operand of f16 or f32, and where the processor does not multiply bf16.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {

// A piece of an operand as stored: `first` is the place of its first element in the rank's part. `inner` and `outer`
// say the same along k and across it, of the extents `inners` and `outers`.
struct ScaledOperand {
  abi::cudaDataType_t type;
  const char* data;  // of the part; its elements may begin within a byte
  int64_t first, ld;
  bool is_adjacent_in_k;
  Scales scales;
  int64_t inner, inners, outer, outers;
};

// Columns of op(B) that one rank holds.
struct ScaledColumns {
  int64_t n;
  ScaledOperand x;
};

struct ScaledProduct {
  int64_t m, n, k;
  ScaledOperand a;
  std::vector<ScaledColumns> b;  // n in all
  void* c;                       // floats; of 8-bit integers int32
  int64_t ldc;
};

// c = alpha op(a) op(b) + c, without c where it is not to be added; alpha is 1 but for integers and mixed pairs. The
// tensor-wide scales are the caller's. 8-bit integers: exact, modulo 2^32. Blocks of 128 are summed each by itself,
// scaled, and added in ascending order.
//
// K blocks are decoded from all K segments that they overlap, so nothing depends on where k is cut; the segments share
// m, n and c.
void ScaledGemm(const KernelChoice& choice, const std::vector<ScaledProduct>& segments, double alpha, bool adds,
                char* scratch);

// Bytes; at least m floats.
int64_t ScaledGemmScratch(const KernelChoice& choice, bool applies_to_sums, int64_t m, int64_t n, int64_t k);

// Whether products of operands of 8 bits and fewer are scaled, or added as integers, after they have been summed.
inline bool AppliesToSums(abi::cudaDataType_t type_a, abi::cudaDataType_t type_b, const Scales& a, const Scales& b) {
  return (type_a == abi::CUDA_R_8I && type_b == abi::CUDA_R_8I) || ScalesSums(a.mode) || ScalesSums(b.mode);
}

}  // namespace jaxmp::hostmp
