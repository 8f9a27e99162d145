// What the reports share: a job with one process for each rank, matrices on a grid, and one call of cublasMpMatmul.
#ifndef REPORT_H_
#define REPORT_H_

#include <cublasmp.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#define CHECK(call)                                                               \
  do {                                                                            \
    const int status = static_cast<int>(call);                                    \
    if (status != 0) {                                                            \
      std::fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, status); \
      std::exit(2);                                                               \
    }                                                                             \
  } while (0)

struct Grid {
  int64_t p, q;
  cublasMpGridLayout_t layout;
  cublasMpGrid_t handle;
};

struct Job {
  int rank, nranks;
  std::string which;  // the last argument of the command line, if the report has several cases
  cudaStream_t stream;
  ncclComm_t comm;
  cublasMpHandle_t handle;
  Grid column, row;  // of all ranks
};

inline Grid MakeGrid(ncclComm_t comm, int64_t p, int64_t q, cublasMpGridLayout_t layout) {
  Grid grid = {p, q, layout, nullptr};
  CHECK(cublasMpGridCreate(p, q, layout, comm, &grid.handle));
  return grid;
}

// Takes RANK RANKS FILE [CASE] from the command line; FILE passes NCCL's id on and must not exist.
inline Job Start(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s RANK RANKS FILE [CASE]\n", argv[0]);
    std::exit(2);
  }
  Job job = {};
  job.rank = std::atoi(argv[1]), job.nranks = std::atoi(argv[2]), job.which = argc > 4 ? argv[4] : "";
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  CHECK(cudaSetDevice(job.rank % devices));
  CHECK(cudaStreamCreateWithFlags(&job.stream, cudaStreamNonBlocking));
  const std::string file = argv[3], unfinished = file + ".part";
  ncclUniqueId id;
  if (job.rank == 0) {
    CHECK(ncclGetUniqueId(&id));
    std::ofstream(unfinished, std::ios::binary).write(id.internal, sizeof(id.internal));
    CHECK(std::rename(unfinished.c_str(), file.c_str()));
  } else {
    while (!std::ifstream(file, std::ios::binary).read(id.internal, sizeof(id.internal))) usleep(100000);
  }
  CHECK(ncclCommInitRank(&job.comm, job.nranks, id, job.rank));
  CHECK(cublasMpCreate(&job.handle, job.stream));
  job.column = MakeGrid(job.comm, job.nranks, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR);
  job.row = job.nranks == 1 ? job.column : MakeGrid(job.comm, 1, job.nranks, CUBLASMP_GRID_LAYOUT_ROW_MAJOR);
  return job;
}

// ---- numbers, which here are exact in their types

inline size_t BytesOf(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return 1;
    case CUDA_R_16F:
      return 2;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_64F:
      return 8;
    default:
      return 16;  // CUDA_C_64F
  }
}

inline void Encode(cudaDataType_t type, double x, void* to) {
  const float single = static_cast<float>(x);
  const double pair[] = {x, 0};
  if (type == CUDA_R_32F) std::memcpy(to, &single, 4);
  if (type == CUDA_R_64F || type == CUDA_C_64F) std::memcpy(to, pair, BytesOf(type));
  if (type != CUDA_R_16F && type != CUDA_R_8F_E4M3) return;
  const int digits = type == CUDA_R_16F ? 10 : 3, bias = type == CUDA_R_16F ? 15 : 7;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(x), &exponent);  // from 0.5 to 1
  uint16_t bits =
      x == 0 ? 0 : static_cast<uint16_t>((exponent - 1 + bias) << digits | int((2 * fraction - 1) * (1 << digits)));
  if (x < 0) bits = static_cast<uint16_t>(bits | 1 << (8 * BytesOf(type) - 1));
  std::memcpy(to, &bits, BytesOf(type));
}

// Returns the real part.
inline double Decode(cudaDataType_t type, const void* from) {
  float single = 0;
  double real = 0;
  uint16_t bits = 0;
  if (type == CUDA_R_32F) return std::memcpy(&single, from, 4), single;
  if (type == CUDA_R_64F || type == CUDA_C_64F) return std::memcpy(&real, from, 8), real;
  std::memcpy(&bits, from, BytesOf(type));
  const int digits = type == CUDA_R_16F ? 10 : 3, bias = type == CUDA_R_16F ? 15 : 7;
  const int top = static_cast<int>(8 * BytesOf(type)) - 1, exponent = (bits & ((1 << top) - 1)) >> digits;
  const double fraction = std::ldexp(bits & ((1 << digits) - 1), -digits);
  const double size = exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
  return bits >> top & 1 ? -size : size;
}

// ---- memory

template <typename T>
T* Put(const std::vector<T>& values) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, values.size() * sizeof(T) + 256));
  CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(memory);
}

template <typename T>
std::vector<T> Get(const T* memory, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// This rank's part of a matrix in column-major order: a block, or all blocks of a dimension that has one process.
struct Matrix {
  cudaDataType_t type;
  int64_t first_row, first_col, rows, cols, lld;
  unsigned char* data;
  cublasMpMatrixDescriptor_t desc;
};

// `value(i, j)` is the element of the whole matrix.
template <typename F>
Matrix Make(const Job& job, const Grid& grid, cudaDataType_t type, int64_t rows, int64_t cols, int64_t row_block,
            int64_t col_block, F value) {
  const bool is_col_major = grid.layout == CUBLASMP_GRID_LAYOUT_COL_MAJOR;
  const int64_t prow = is_col_major ? job.rank % grid.p : job.rank / grid.q;
  const int64_t pcol = is_col_major ? job.rank / grid.p : job.rank % grid.q;
  Matrix x = {type, prow * row_block, pcol * col_block, 0, 0, 0, nullptr, nullptr};
  x.rows = grid.p == 1 ? rows : std::max<int64_t>(0, std::min(row_block, rows - x.first_row));
  x.cols = grid.q == 1 ? cols : std::max<int64_t>(0, std::min(col_block, cols - x.first_col));
  x.lld = std::max<int64_t>(1, x.rows);
  std::vector<unsigned char> bytes(static_cast<size_t>(x.lld * x.cols) * BytesOf(type));
  for (int64_t j = 0; j < x.cols; ++j) {
    for (int64_t i = 0; i < x.rows; ++i) {
      Encode(type, value(x.first_row + i, x.first_col + j), &bytes[static_cast<size_t>(i + j * x.lld) * BytesOf(type)]);
    }
  }
  x.data = Put(bytes);
  CHECK(cublasMpMatrixDescriptorCreate(rows, cols, row_block, col_block, 0, 0, x.lld, type, grid.handle, &x.desc));
  return x;
}

// Returns the largest |D - want(i, j)| in this rank's block.
template <typename F>
double Worst(const Matrix& x, F want) {
  const auto bytes = Get(x.data, static_cast<size_t>(x.lld * x.cols) * BytesOf(x.type));
  double worst = 0;
  for (int64_t j = 0; j < x.cols; ++j) {
    for (int64_t i = 0; i < x.rows; ++i) {
      const double got = Decode(x.type, &bytes[static_cast<size_t>(i + j * x.lld) * BytesOf(x.type)]);
      const double error = std::abs(got - want(x.first_row + i, x.first_col + j));
      worst = error <= worst ? worst : error;  // also a NaN
    }
  }
  return worst;
}

// ---- the call

inline cublasMpMatmulDescriptor_t Describe(cublasComputeType_t compute, cublasOperation_t a, cublasOperation_t b,
                                           int32_t epilogue) {
  cublasMpMatmulDescriptor_t call = nullptr;
  CHECK(cublasMpMatmulDescriptorCreate(&call, compute));
  CHECK(cublasMpMatmulDescriptorSetAttribute(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, &a, sizeof(a)));
  CHECK(cublasMpMatmulDescriptorSetAttribute(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, &b, sizeof(b)));
  CHECK(cublasMpMatmulDescriptorSetAttribute(call, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, &epilogue, 4));
  return call;
}

template <typename T>
void Set(cublasMpMatmulDescriptor_t call, cublasMpMatmulDescriptorAttribute_t attribute, T value) {
  CHECK(cublasMpMatmulDescriptorSetAttribute(call, attribute, &value, sizeof(value)));
}

// D = op(A) op(B); C is not given. Returns what cublasMpMatmul_bufferSize or cublasMpMatmul returns.
inline cublasMpStatus_t Multiply(const Job& job, cublasMpMatmulDescriptor_t call, int64_t m, int64_t n, int64_t k,
                                 const Matrix& a, const Matrix& b, const Matrix& d) {
  const cudaDataType_t scale = a.type == CUDA_R_64F || a.type == CUDA_C_64F ? a.type : CUDA_R_32F;
  alignas(16) char alpha[16] = {}, beta[16] = {};
  Encode(scale, 1, alpha);
  size_t device_bytes = 0, host_bytes = 0;
  cublasMpStatus_t status =
      cublasMpMatmul_bufferSize(job.handle, call, m, n, k, alpha, a.data, 1, 1, a.desc, b.data, 1, 1, b.desc, beta,
                                nullptr, 1, 1, nullptr, d.data, 1, 1, d.desc, &device_bytes, &host_bytes);
  if (status != CUBLASMP_STATUS_SUCCESS) return status;
  void* workspace = nullptr;
  CHECK(cublasMpMalloc(job.column.handle, &workspace, device_bytes + 256));
  if (job.nranks > 1) CHECK(cublasMpBufferRegister(job.row.handle, workspace, device_bytes + 256));
  std::vector<char> host(host_bytes + 1);
  status = cublasMpMatmul(job.handle, call, m, n, k, alpha, a.data, 1, 1, a.desc, b.data, 1, 1, b.desc, beta, nullptr,
                          1, 1, nullptr, d.data, 1, 1, d.desc, workspace, device_bytes, host.data(), host_bytes);
  CHECK(cudaStreamSynchronize(job.stream));
  return status;
}

// Prints a line for this rank, and returns the exit status: 0 where the library did what its header says.
inline int Report(const Job& job, bool is_right, const char* what, double value) {
  int version = 0;
  CHECK(cublasMpGetVersion(&version));
  std::printf("cuBLASMp %d, rank %d of %d: %s: %s %g\n", version, job.rank, job.nranks, is_right ? "right" : "WRONG",
              what, value);
  return is_right ? 0 : 1;
}

#endif  // REPORT_H_
