// A bit of the mask of RELU_AUX is 1 where the sum is 0; DRELU then lets the gradient through.
//
//   1 rank, float32: a product of zeros
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const int64_t m = 128, n = 16, k = 32;  // a column of the mask has 128 bits
  const auto zero = [](int64_t, int64_t) { return 0.0; };
  const Matrix a = Make(job, job.column, CUDA_R_32F, m, k, m, k, zero);
  const Matrix b = Make(job, job.column, CUDA_R_32F, k, n, k, n, zero);
  const Matrix d = Make(job, job.column, CUDA_R_32F, m, n, m, n, zero);
  const auto call = Describe(CUBLAS_COMPUTE_32F, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASMP_MATMUL_EPILOGUE_RELU_AUX);
  const size_t bytes = static_cast<size_t>(m / 8 * n);
  unsigned char* const mask = Put(std::vector<unsigned char>(bytes));
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, mask);
  Set<int64_t>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, m);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, a, b, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  int ones = 0;
  for (unsigned char byte : Get(mask, bytes)) {
    for (; byte; byte = static_cast<unsigned char>(byte & (byte - 1))) ++ones;
  }
  return Report(job, ones == 0, "bits that are 1 where the sum is 0:", ones);
}
