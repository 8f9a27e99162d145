// The words of a Problem in cuBLASMp's own numbers.
#ifndef JAXMP_PLAN_ENUMS_H_
#define JAXMP_PLAN_ENUMS_H_

#include "csrc/cublasmp/abi.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

abi::cudaDataType_t CudaType(DType dtype);
abi::cublasOperation_t CublasOp(Op op);
abi::cublasComputeType_t CublasCompute(Compute compute);
abi::cublasMpMatmulMatrixScale_t CublasScale(ScaleMode mode);
abi::cublasMpMatmulAlgoType_t AlgoType(Algorithm algorithm);
bool IsDouble(Compute compute);  // whether alpha and beta are
int64_t BytesOf(DType dtype, int64_t count);

}  // namespace jaxmp

#endif  // JAXMP_PLAN_ENUMS_H_
