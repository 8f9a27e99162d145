// Scales of blocks of 128 along k (VEC128_FP32) on both operands are read wrongly where the call sums over ranks.
//
//   2 ranks, float8 e4m3 -> float32, A transposed: a reduce-scatter, or with `all_reduce` an all-reduce
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const bool sums_everywhere = job.which == "all_reduce";
  const int64_t P = job.nranks, m = 32 * P, n = 16 * P, k = 256 * P;
  const auto one = [](int64_t, int64_t) { return 1.0; };
  const auto zero = [](int64_t, int64_t) { return 0.0; };
  // A power of two for each block along k and each row of op(A), column of op(B).
  const auto scale = [](int64_t block, int64_t outer, int64_t seed) {
    return std::ldexp(1.0, static_cast<int>((5 * block + 7 * outer + seed) % 3) - 1);
  };
  const Matrix a = Make(job, job.column, CUDA_R_8F_E4M3, k, m, k / P, m, one);
  const Matrix b = Make(job, job.column, CUDA_R_8F_E4M3, k, n, k / P, sums_everywhere ? n : n / P, one);
  Matrix d = Make(job, job.row, CUDA_R_32F, m, sums_everywhere ? n * P : n, m, sums_everywhere ? n : n / P, zero);
  if (sums_everywhere) d.first_col = 0;  // every rank has all of D
  const int64_t blocks = k / P / 128, first = a.first_row / 128;
  std::vector<float> of_a, of_b;  // of this rank's part of k, by block, then by row or column
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < m; ++i) of_a.push_back(static_cast<float>(scale(first + block, i, 1)));
    for (int64_t j = 0; j < n; ++j) of_b.push_back(static_cast<float>(scale(first + block, j, 2)));
  }
  const auto call = Describe(CUBLAS_COMPUTE_32F, CUBLAS_OP_T, CUBLAS_OP_N,
                             sums_everywhere ? CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE : CUBLASMP_MATMUL_EPILOGUE_DEFAULT);
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, Put(of_a));
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER, Put(of_b));
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE, CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE, CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, a, b, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double worst = Worst(d, [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t block = 0; block < k / 128; ++block) sum += 128 * scale(block, i, 1) * scale(block, j, 2);
    return sum;
  });
  return Report(job, worst == 0, "largest error of exact sums", worst);
}
