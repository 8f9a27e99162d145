// Products of numbers of 8 bits and fewer: panels of k are decoded to bf16, which holds all of them and their products
// with block scales, and multiplied by the 16-bit kernels.
#ifndef JAXMP_HOSTMP_GEMM_SCALED_GEMM_H_
#define JAXMP_HOSTMP_GEMM_SCALED_GEMM_H_

#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {

// An operand as stored, from the first element of a piece on. `inner` and `outer` say where in the rank's part the
// piece begins, of the extents `inners` and `outers`.
struct NarrowOperand {
  abi::cudaDataType_t type;
  const char* data;
  int64_t ld;
  bool is_adjacent_in_k;
  Scales scales;
  int64_t inner, inners, outer, outers;
};

// Columns of op(B) that one rank holds.
struct NarrowColumns {
  int64_t n;
  NarrowOperand x;
};

struct NarrowProduct {
  int64_t m, n, k;
  NarrowOperand a;
  std::vector<NarrowColumns> b;  // n in all
  void* c;                       // floats; of 8-bit integers int32
  int64_t ldc;
};

// c = alpha op(a) op(b) + c, without c where it is not to be added. The tensor-wide scales are the caller's to put
// into alpha. 8-bit integers: exact, modulo 2^32.
void narrow_gemm(const NarrowProduct& product, double alpha, bool adds, char* scratch);

// c = op(a) op(b), of a product whose k lies in several parts, each sum in one order: the parts are decoded together
// into panels that begin at multiples of their depth, so nothing depends on where k is cut. Blocks of 128 are summed
// each by itself, scaled, and added in ascending order. For operands that are adjacent in k, with equal m, n and c.
void narrow_gemm_in_order(const std::vector<NarrowProduct>& parts, char* scratch);

// Bytes, for any product of at most m x n; at least m floats.
int64_t narrow_scratch(bool applies_to_sums, bool is_ordered, int64_t m, int64_t n, int64_t k);

// Whether products of these operands are scaled, or added as integers, after they have been summed.
inline bool applies_to_sums(abi::cudaDataType_t type, const Scales& a, const Scales& b) {
  return type == abi::CUDA_R_8I || scales_sums(a.mode) || scales_sums(b.mode);
}

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_SCALED_GEMM_H_
