// An all-reduce of one rank without another epilogue leaves D wrong.
//
//   1 rank, float32, A transposed
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const int64_t m = 24, n = 16, k = 32;
  const auto a = [](int64_t l, int64_t i) { return double((3 * i + 5 * l) % 7 - 3); };
  const auto b = [](int64_t l, int64_t j) { return double((2 * l + 7 * j) % 5 - 2); };
  const Matrix x = Make(job, job.column, CUDA_R_32F, k, m, k, m, a),
               y = Make(job, job.column, CUDA_R_32F, k, n, k, n, b);
  const Matrix d = Make(job, job.column, CUDA_R_32F, m, n, m, n, [](int64_t, int64_t) { return 1000.0; });
  const auto call = Describe(CUBLAS_COMPUTE_32F, CUBLAS_OP_T, CUBLAS_OP_N, CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, x, y, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double worst = Worst(d, [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t l = 0; l < k; ++l) sum += a(l, i) * b(l, j);
    return sum;
  });
  return Report(job, worst == 0, "largest error of exact sums", worst);
}
