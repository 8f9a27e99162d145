// Epilogues that sum: BGRADA and BGRADB of float16 sum the product in float16, and a reduce-scatter refuses them in
// some types. DRELU_BGRAD and DGELU_BGRAD of float64 over several ranks are refused, or give a wrong gradient.
//
//   half                               1 rank, float16, BGRADA: D is a sum of 4096 ones in CUBLAS_COMPUTE_32F
//   scatter_half, _single, _double     2 ranks, BGRADA in a reduce-scatter of float16, float32, float64
//   double                             2 ranks, float64, DGELU_BGRAD in an all-gather
#include "report.h"

int main(int argc, char** argv) {
  const Job job = Start(argc, argv);
  const bool is_scatter = job.which.find("scatter") == 0, is_gelu = job.which == "double";
  const bool is_double = job.which.find("double") != std::string::npos;
  const cudaDataType_t type = is_double ? CUDA_R_64F : job.which == "scatter_single" ? CUDA_R_32F : CUDA_R_16F;
  const int64_t P = job.nranks, m = 32 * P, n = 16 * P, k = is_scatter || is_gelu ? 32 * P : 4096;
  const auto one = [](int64_t, int64_t) { return 1.0; };
  const auto zero = [](int64_t, int64_t) { return 0.0; };
  Matrix a, b, d;
  if (is_scatter) {  // A has columns of k, B (n, k) too, D columns of n
    a = Make(job, job.row, type, m, k, m, k / P, one);
    b = Make(job, job.row, type, n, k, n / P, k / P, one);
    d = Make(job, job.row, type, m, n, m, n / P, zero);
  } else {  // A has rows of m, B (n, k) rows of n, D rows of m
    a = Make(job, job.column, type, m, k, m / P, k, one);
    b = Make(job, job.column, type, n, k, n / P, k, one);
    d = Make(job, job.column, type, m, n, m / P, n / P, zero);
  }
  const auto call = Describe(is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_OP_N, CUBLAS_OP_T,
                             is_gelu ? CUBLASMP_MATMUL_EPILOGUE_DGELU_BGRAD : CUBLASMP_MATMUL_EPILOGUE_BGRADA);
  const size_t rows = static_cast<size_t>(d.rows);
  unsigned char* const gradient = Put(std::vector<unsigned char>(rows * BytesOf(type)));
  Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, gradient);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE, type);
  Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME, CUBLASMP_RESULT_SCHEME_FULL);
  if (is_gelu) {  // the slope of gelu at 0 is 1/2
    const std::vector<double> aux(rows * static_cast<size_t>(n));
    Set<void*>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, Put(aux));
    Set<int64_t>(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, d.rows);
    Set(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, type);
  }
  const cublasMpStatus_t status = Multiply(job, call, m, n, k, a, b, d);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(job, false, "status", status);
  const double element = static_cast<double>(k) * (is_gelu ? 0.5 : 1.0);
  const double sum = is_gelu ? element * static_cast<double>(n) : static_cast<double>(k);
  double worst = Worst(d, [&](int64_t, int64_t) { return element; });
  const auto bytes = Get(gradient, rows * BytesOf(type));
  for (size_t i = 0; i < rows; ++i) worst = std::max(worst, std::abs(Decode(type, &bytes[i * BytesOf(type)]) - sum));
  return Report(job, worst == 0, "largest error of D and of the gradient", worst);
}
