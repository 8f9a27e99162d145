// What the kernels share that convert a K block as it is stored, and leave the product to a BLAS.
#ifndef JAXMP_HOSTMP_GEMM_STORED_BLOCK_H_
#define JAXMP_HOSTMP_GEMM_STORED_BLOCK_H_

#include <cstdint>

#include "csrc/hostmp/kernels/blocked_gemm.h"

namespace jaxmp::hostmp {

// Columns of an operand as stored; `offset` is its first element's.
struct StoredBlock {
  const void* data;
  int64_t offset, ld, rows, cols;
};

// A K block deep enough for the BLAS's own blocking, and small enough to stay in the cache. The operands have one K
// segment; C is one tile.
struct StoredBlocks {
  static constexpr int64_t kKC = 512, kMC = kUncut, kNC = kUncut, kMR = kUncut, kNR = kUncut;
  static constexpr bool kReusesB = false;

  static StoredBlock stored_a(const KBlock<Product>& block) {
    const Product& p = *block.segment;
    if (p.trans_a == abi::CUBLAS_OP_N) return {p.a, block.k * p.lda, p.lda, p.m, block.depth};
    return {p.a, block.k, p.lda, block.depth, p.m};
  }
  static StoredBlock stored_b(const KBlock<Product>& block) {
    const Product& p = *block.segment;
    if (p.trans_b == abi::CUBLAS_OP_N) return {p.b, block.k, p.ldb, block.depth, p.n};
    return {p.b, block.k * p.ldb, p.ldb, p.n, block.depth};
  }
  // Of the converted blocks, which are dense.
  static Product product_of(const KBlock<Product>& block, const Packed& packed) {
    Product p = *block.segment;
    p.k = block.depth;
    p.a = packed.a;
    p.lda = p.trans_a == abi::CUBLAS_OP_N ? p.m : p.k;
    p.b = packed.b;
    p.ldb = p.trans_b == abi::CUBLAS_OP_N ? p.k : p.n;
    return p;
  }
};

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GEMM_STORED_BLOCK_H_
