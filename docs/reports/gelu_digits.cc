// GELU is right to about 5 digits of float32, and to 11 of float64.
//
//   1 rank, a product of k = 1: float32, or with `double` float64
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const bool is_double = job.which == "double";
  const cudaDataType_t type = is_double ? CUDA_R_64F : CUDA_R_32F;
  const int64_t m = 64, n = 64, k = 1;
  const auto x = [](int64_t i, int64_t) { return double(i - 32) / 8; };
  const auto y = [](int64_t, int64_t j) { return double(j + 1) / 64; };
  const Matrix a = Make(job, job.column, type, m, k, m, k, x), b = Make(job, job.column, type, k, n, k, n, y);
  const Matrix d = Make(job, job.column, type, m, n, m, n, [](int64_t, int64_t) { return 0.0; });
  const auto call = Describe(is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_OP_N, CUBLAS_OP_N,
                             CUBLASMP_MATMUL_EPILOGUE_GELU);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, a, b, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double worst = Worst(d, [&](int64_t i, int64_t j) {
    const double z = x(i, 0) * y(0, j);  // exact in both types
    return z / 2 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (z + 0.044715 * z * z * z)));
  });
  // Numbers here are at most 4; a few roundings of float32 are 1e-6, of float64 2e-15.
  return Report(job, worst <= (is_double ? 1e-14 : 4e-6), "largest error of gelu", worst);
}
