// One rank's Matmul as it arrived.
#pragma once

#include <complex>
#include <cstdint>
#include <cstring>
#include <memory>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/distribution.h"
#include "csrc/hostmp/handles/handles.h"
#include "csrc/hostmp/numeric/dtypes.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {

// A submatrix of a distributed matrix, with one rank's pointer to its local part.
struct Operand {
  const char* data = nullptr;
  int64_t row = 0, col = 0;  // of the submatrix, from 0
  abi::cublasMpMatrixDescriptor desc{};

  int64_t local_rows() const { return LocalExtent(desc.rows, RowOf(desc.grid, desc.grid.comm.rank)); }
  int64_t local_cols() const { return LocalExtent(desc.cols, ColOf(desc.grid, desc.grid.comm.rank)); }
};

// One rank's Matmul. Everything is held by value, because the caller may reuse its descriptors at once.
struct MatmulCall {
  int rank = 0, nranks = 1;
  int64_t m = 0, n = 0, k = 0;
  abi::cublasOperation_t trans_a = abi::CUBLAS_OP_N, trans_b = abi::CUBLAS_OP_N;
  abi::cublasComputeType_t compute = abi::CUBLAS_COMPUTE_32F;
  int communication_sm_count = 0;  // 0: the library's choice
  abi::cublasMpMatmulAlgoType_t algo = abi::CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT;
  int communication_type = -1;  // a cudaDataType_t; -1: the library's choice
  int epilog = 0;               // without the ALLREDUCE bit
  bool is_all_reduce = false;
  bool fixed_reduction_order = false;
  std::complex<double> alpha, beta;
  Operand a, b, c, d;
  bool has_c = false;
  bool reads_c = false;  // there is a C, and beta is not 0
  const void* bias = nullptr;
  abi::cudaDataType_t bias_type = abi::CUDA_R_32F;
  void* aux = nullptr;
  int64_t aux_ld = 0;
  abi::cudaDataType_t aux_type = abi::CUDA_R_8U;  // CUDA_R_8U: the mask of RELU
  void* gradient = nullptr;
  Scales scale_a, scale_b, scale_c, scale_d, scale_aux;
  bool has_d_out_scale = false;
  Scales d_out_scale;                               // an output
  uint32_t *amax_d = nullptr, *amax_aux = nullptr;  // bits of floats
  char* workspace = nullptr;
  std::shared_ptr<const ProductTiling> tiling;

  const abi::cublasMpGrid& grid() const { return d.desc.grid; }
  bool is_a_plain() const { return trans_a == abi::CUBLAS_OP_N; }
  bool is_b_plain() const { return trans_b == abi::CUBLAS_OP_N; }
  // The axes of op(A), m x k, and of op(B), k x n.
  const Axis& a_m() const { return is_a_plain() ? a.desc.rows : a.desc.cols; }
  const Axis& a_k() const { return is_a_plain() ? a.desc.cols : a.desc.rows; }
  const Axis& b_k() const { return is_b_plain() ? b.desc.rows : b.desc.cols; }
  const Axis& b_n() const { return is_b_plain() ? b.desc.cols : b.desc.rows; }
  // True if partial sums travel between the ranks: A and B are distributed along k only.
  bool sums_over_ranks() const { return a_k().nprocs == nranks && b_k().nprocs == nranks; }
  abi::cudaDataType_t accumulator() const {
    return is_mixed() || scales_integers() ? abi::CUDA_R_32F : AccumulatorOf(a.desc.type);
  }
  // True if operands are decoded: both, or one that is multiplied by a wider one.
  bool is_decoded() const { return is_mixed() || (takes_scales() && !scales_integers()); }
  bool is_mixed() const { return Facts(a.desc.type).is_low_precision != Facts(b.desc.type).is_low_precision; }
  bool is_low_precision() const { return Facts(a.desc.type).is_low_precision && Facts(b.desc.type).is_low_precision; }
  bool takes_scales() const { return is_low_precision() && (IsScaled(a.desc.type) || scales_integers()); }
  // True if exact sums of integers become floats, times their scales.
  bool scales_integers() const {
    return is_low_precision() && a.desc.type == abi::CUDA_R_8I && d.desc.type != abi::CUDA_R_32I;
  }
  // True if alpha and the scales of whole operands are applied to the finished sums, and C is added after them.
  bool scales_last() const { return fixed_reduction_order || takes_scales(); }
  bool stores_low_precision() const { return Facts(d.desc.type).is_low_precision; }
  // True if D is symmetric whenever A and B are one matrix: op(A) op(B) is X X^T, A and B have the same distribution.
  bool may_be_symmetric() const;
};

// A rectangle of local memory, column-major.
struct MatrixView {
  char* data;
  int64_t ld;  // elements
};

inline MatrixView Locate(const Operand& x, int64_t row, int64_t col) {
  const int64_t ld = x.desc.lld;
  return {const_cast<char*>(x.data) + BytesOf(x.desc.type, col * ld + row), ld};
}

inline void CopyView(abi::cudaDataType_t type, const MatrixView& from, int64_t rows, int64_t cols,
                     const MatrixView& to) {
  for (int64_t col = 0; col < cols; ++col) {
    std::memcpy(to.data + BytesOf(type, col * to.ld), from.data + BytesOf(type, col * from.ld),
                static_cast<size_t>(BytesOf(type, rows)));
  }
}

}  // namespace jaxmp::hostmp
