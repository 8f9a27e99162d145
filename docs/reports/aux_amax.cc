// The largest absolute value of an fp8 aux is left unset where the call sums over ranks.
//
//   2 ranks, float8 e4m3 with GELU_AUX, a reduce-scatter; A transposed, D and aux e4m3
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const int64_t P = job.nranks, m = 32 * P, n = 16 * P, k = 32 * P;
  const cudaDataType_t type = CUDA_R_8F_E4M3;
  const auto one = [](int64_t, int64_t) { return 1.0; };
  const auto zero = [](int64_t, int64_t) { return 0.0; };
  const Matrix a = Make(job, job.column, type, k, m, k / P, m, one);
  const Matrix b = Make(job, job.column, type, k, n, k / P, n / P, one);
  const Matrix d = Make(job, job.row, type, m, n, m, n / P, zero);
  const auto call = Describe(CUBLAS_COMPUTE_32F, CUBLAS_OP_T, CUBLAS_OP_N, CUBLASMP_MATMUL_EPILOGUE_GELU_AUX);
  unsigned char* const aux = Put(std::vector<unsigned char>(static_cast<size_t>(m * (n / P))));
  float* const scale = Put(std::vector<float>{1.0F});
  float* const amax = Put(std::vector<float>{-1.0F});
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, aux);
  Set<int64_t>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, m);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, type);
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER, scale);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE, CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32);
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER, amax);
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER, scale);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_MODE, CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, a, b, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double got = Get(amax, 1)[0];
  return Report(job, got == static_cast<double>(k), "the largest absolute value of aux (was -1 before the call)", got);
}
