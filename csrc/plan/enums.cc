#include "csrc/plan/enums.h"

#include "csrc/cublasmp/host_types.h"

namespace jaxmp {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

cudaDataType_t CudaType(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return CUDA_R_64F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kC64:
      return CUDA_C_32F;
    case DType::kC128:
      return CUDA_C_64F;
    case DType::kU8:
      return CUDA_R_8U;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    case DType::kE2M1:
      return CUDA_R_4F_E2M1;
    case DType::kS8:
      return CUDA_R_8I;
    case DType::kS32:
      return CUDA_R_32I;
    case DType::kS4:
      return host_types::kS4;
    case DType::kU4:
      return host_types::kU4;
    case DType::kE3M4:
      return host_types::kE3M4;
    case DType::kE4M3Ieee:
      return host_types::kE4M3Ieee;
    case DType::kE4M3B11Fnuz:
      return host_types::kE4M3B11Fnuz;
    case DType::kE4M3Fnuz:
      return host_types::kE4M3Fnuz;
    case DType::kE5M2Fnuz:
      return host_types::kE5M2Fnuz;
    case DType::kE8M0:
      return host_types::kE8M0;
    case DType::kF32:
    case DType::kNone:
      break;
  }
  return CUDA_R_32F;
}

cublasOperation_t CublasOp(Op op) { return op == Op::kN ? CUBLAS_OP_N : op == Op::kT ? CUBLAS_OP_T : CUBLAS_OP_C; }

cublasComputeType_t CublasCompute(Compute compute) {
  switch (compute) {
    case Compute::k32F:
      return CUBLAS_COMPUTE_32F;
    case Compute::k32FPedantic:
      return CUBLAS_COMPUTE_32F_PEDANTIC;
    case Compute::k32FFastTF32:
      return CUBLAS_COMPUTE_32F_FAST_TF32;
    case Compute::k32FFast16BF:
      return CUBLAS_COMPUTE_32F_FAST_16BF;
    case Compute::k32FFast16F:
      return CUBLAS_COMPUTE_32F_FAST_16F;
    case Compute::k32FEmulated16BFX9:
      return CUBLAS_COMPUTE_32F_EMULATED_16BFX9;
    case Compute::k64F:
      return CUBLAS_COMPUTE_64F;
    case Compute::k64FPedantic:
      return CUBLAS_COMPUTE_64F_PEDANTIC;
    case Compute::k32I:
      return CUBLAS_COMPUTE_32I;
    case Compute::k64FEmulatedFixedPoint:
      break;
  }
  return CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT;
}

cublasMpMatmulMatrixScale_t CublasScale(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kVec16:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    case ScaleMode::kVec32:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::kOuterVec:
      return CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32;
    case ScaleMode::kVec128:
      return CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32;
    case ScaleMode::kBlk128:
      return CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32;
    case ScaleMode::kNone:
    case ScaleMode::kScalar:
      break;
  }
  return CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
}

int64_t BytesOf(DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kE2M1:
    case DType::kS4:
    case DType::kU4:
      return (count + 1) / 2;
    case DType::kU8:
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kS8:
    case DType::kE3M4:
    case DType::kE4M3Ieee:
    case DType::kE4M3B11Fnuz:
    case DType::kE4M3Fnuz:
    case DType::kE5M2Fnuz:
    case DType::kE8M0:
      return count;
    case DType::kBF16:
    case DType::kF16:
      return 2 * count;
    case DType::kF32:
    case DType::kS32:
      return 4 * count;
    case DType::kF64:
    case DType::kC64:
      return 8 * count;
    case DType::kC128:
      return 16 * count;
    case DType::kNone:
      break;
  }
  return 0;
}

bool IsDouble(Compute compute) {
  return compute == Compute::k64F || compute == Compute::k64FPedantic || compute == Compute::k64FEmulatedFixedPoint;
}

cublasMpMatmulAlgoType_t AlgoType(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDefault:
      break;
    case Algorithm::kSplitP2P:
      return CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P;
    case Algorithm::kSplitMulticast:
      return CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST;
    case Algorithm::kAtomicP2P:
      return CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_P2P;
    case Algorithm::kAtomicMulticast:
      return CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST;
    case Algorithm::kNoOverlap:
      return CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP;
    case Algorithm::kFused:
      return CUBLASMP_MATMUL_ALGO_TYPE_FUSED;
  }
  return CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT;
}

}  // namespace jaxmp
