// On grids with several process rows D is wrong, or the call fails or never ends, where B is transposed; of complex128
// the process dies where A is transposed too. An all-gather that its ranks do not divide evenly takes the same path.
//
//   grid     4 ranks, 2 x 2: float32, A as it is, B transposed
//   complex  4 ranks, 2 x 2: complex128, A and B transposed
//   uneven   2 ranks: float32, an all-gather of 13 x 17 and 17 x 11, B transposed
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const bool is_uneven = job.which == "uneven", is_complex = job.which == "complex";
  const int64_t m = is_uneven ? 13 : 24, n = is_uneven ? 11 : 16, k = is_uneven ? 17 : 32;
  const cudaDataType_t type = is_complex ? CUDA_C_64F : CUDA_R_32F;
  const auto a = [](int64_t i, int64_t l) { return double((3 * i + 5 * l) % 7 - 3); };
  const auto b = [](int64_t l, int64_t j) { return double((2 * l + 7 * j) % 5 - 2); };
  const auto b_stored = [&](int64_t j, int64_t l) { return b(l, j); };
  const auto a_stored = [&](int64_t l, int64_t i) { return a(i, l); };
  const auto zero = [](int64_t, int64_t) { return 0.0; };
  const auto want = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t l = 0; l < k; ++l) sum += a(i, l) * b(l, j);
    return sum;
  };
  const auto part = [](int64_t extent, int64_t parts) { return (extent + parts - 1) / parts; };
  Matrix x, y, d;
  if (is_uneven) {
    const int64_t P = job.nranks;
    x = Make(job, job.column, type, m, k, part(m, P), k, a);
    y = Make(job, job.column, type, n, k, part(n, P), k, b_stored);
    d = Make(job, job.column, type, m, n, part(m, P), part(n, P), zero);
  } else {
    const Grid both = MakeGrid(job.comm, 2, 2, CUBLASMP_GRID_LAYOUT_COL_MAJOR);
    x = is_complex ? Make(job, both, type, k, m, k / 2, m / 2, a_stored) : Make(job, both, type, m, k, m / 2, k / 2, a);
    y = Make(job, both, type, n, k, n / 2, k / 2, b_stored);
    d = Make(job, both, type, m, n, m / 2, n / 2, zero);
  }
  const auto call = Describe(is_complex ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                             is_complex ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_T, CUBLASMP_MATMUL_EPILOGUE_DEFAULT);
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, x, y, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double worst = Worst(d, want);
  return Report(job, worst == 0, "largest error of exact sums", worst);
}
