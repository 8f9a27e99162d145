// Products of fp8 and fp4, and of numbers of 8 bits and fewer with a wider operand. K blocks of both operands are
// decoded to bf16, which holds all such numbers and their products with block scales, for the 16-bit kernels. They are
// decoded to f32 if the wider operand is f16 or f32, or is bf16 and the processor does not multiply bf16.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {

// A piece of an operand as stored. `first`: the position of its first element in the rank's part. `inner` and `outer`:
// its position along k and across it, within the extents `inners` and `outers`.
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
  void* c;                       // floats
  int64_t ldc;
};

// c = alpha op(a) op(b), or c += alpha op(a) op(b) if `adds`; alpha is 1 except for mixed pairs. The caller applies
// tensor-wide scales. Blocks of 128 are summed separately, scaled, and added in ascending order.
//
// K blocks are decoded from all K segments that they overlap, so nothing depends on where k is cut; the segments share
// m, n and c.
void ScaledGemm(const KernelChoice& choice, const std::vector<ScaledProduct>& segments, double alpha, bool adds,
                char* scratch);

// Bytes of scratch; at least m floats.
int64_t ScaledGemmScratch(const KernelChoice& choice, bool scales_sums, int64_t m, int64_t n, int64_t k);

}  // namespace jaxmp::hostmp
