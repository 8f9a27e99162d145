// Numbers of any type, and the places of a distributed matrix's elements: element by element, from the definitions.
#ifndef JAXMP_TESTS_PLACEMENT_H_
#define JAXMP_TESTS_PLACEMENT_H_

#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/dtypes.h"
#include "csrc/hostmp/numeric/low_precision.h"

namespace jaxmp::test {

using namespace abi;  // NOLINT: cuBLASMp's own names
using Number = std::complex<double>;
using hostmp::Facts;

inline Number decode(cudaDataType_t type, const char* from) {
  const auto read = [from](auto value) {
    std::memcpy(&value, from, sizeof(value));
    return value;
  };
  float wide = 0;
  switch (type) {
    case CUDA_R_32F:
      return read(float{});
    case CUDA_R_64F:
      return read(double{});
    case CUDA_C_32F:
      return Number(read(std::complex<float>{}));
    case CUDA_C_64F:
      return read(Number{});
    case CUDA_R_16BF: {
      const auto value = read(hostmp::BFloat16{});
      hostmp::Widen(&value, &wide, 1);
      return wide;
    }
    case CUDA_R_32I:
      return Number(read(int32_t{}));
    default: {
      if (Facts(type).is_low_precision) {
        hostmp::Decode(type, from, 0, 1, 1.0f, &wide);
        return wide;
      }
      const auto value = read(hostmp::Float16{});
      hostmp::Widen(&value, &wide, 1);
      return wide;
    }
  }
}

// The code of a number that a type of 8 bits or fewer has.
inline uint8_t code_of(cudaDataType_t type, float value) {
  static thread_local std::map<cudaDataType_t, std::map<float, uint8_t>> known;
  std::map<float, uint8_t>& codes = known[type];
  for (int code = 0; codes.empty() || code % (1 << Facts(type).bits) != 0; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    float number;
    hostmp::Decode(type, &byte, 0, 1, 1.0f, &number);
    codes.emplace(number, byte);
  }
  return codes.at(value);
}

inline void encode(cudaDataType_t type, Number number, char* to) {
  const auto write = [to](auto value) { std::memcpy(to, &value, sizeof(value)); };
  const auto real = static_cast<float>(number.real());
  hostmp::BFloat16 bf16;
  hostmp::Float16 f16;
  switch (type) {
    case CUDA_R_32F:
      return write(real);
    case CUDA_R_64F:
      return write(number.real());
    case CUDA_C_32F:
      return write(std::complex<float>(number));
    case CUDA_C_64F:
      return write(number);
    case CUDA_R_16BF:
      hostmp::Downconvert(&real, &bf16, 1);
      return write(bf16);
    case CUDA_R_32I:
      return write(static_cast<int32_t>(number.real()));
    case CUDA_R_8I:
      return write(static_cast<int8_t>(number.real()));
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
      return hostmp::Encode(type, &real, 1, to);
    default:
      if (Facts(type).is_low_precision) return write(code_of(type, real));
      hostmp::Downconvert(&real, &f16, 1);
      return write(f16);
  }
}

// Encodes a number as element `index` of an array.
inline void encode_at(cudaDataType_t type, Number number, char* array, int64_t index) {
  if (Facts(type).bits != 4) return encode(type, number, array + index * Facts(type).bytes);
  const int code = code_of(type, static_cast<float>(number.real())), half = index % 2 * 4;
  char& byte = array[index / 2];
  byte = static_cast<char>((byte & ~(0xf << half)) | code << half);
}

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<Number> values;  // column-major

  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {}
  Number& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i + j * rows)]; }
  const Number& at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i + j * rows)]; }
};

struct Grid {
  int64_t nprow = 1, npcol = 1;
  cublasMpGridLayout_t layout = CUBLASMP_GRID_LAYOUT_COL_MAJOR;
};

struct Layout {
  Grid grid;
  int64_t rows = 0, cols = 0, mb = 1, nb = 1, rsrc = 0, csrc = 0;

  int64_t owner(int64_t i, int64_t j) const {
    const int64_t p = (i / mb + rsrc) % grid.nprow, q = (j / nb + csrc) % grid.npcol;
    return grid.layout == CUBLASMP_GRID_LAYOUT_COL_MAJOR ? p + q * grid.nprow : p * grid.npcol + q;
  }
  int64_t local_row(int64_t i) const { return i / mb / grid.nprow * mb + i % mb; }
  int64_t local_col(int64_t j) const { return j / nb / grid.npcol * nb + j % nb; }
  // work(row, column, local row, local column) for each element of a rank.
  template <typename Work>
  void each_of(int64_t rank, const Work& work) const {
    const auto [own_rows, own_cols] = own(rank);
    for (size_t col = 0; col < own_cols.size(); ++col) {
      for (size_t row = 0; row < own_rows.size(); ++row) {
        work(own_rows[row], own_cols[col], static_cast<int64_t>(row), static_cast<int64_t>(col));
      }
    }
  }
  std::pair<int64_t, int64_t> local_shape(int64_t rank) const {
    const auto [own_rows, own_cols] = own(rank);
    return {own_rows.size(), own_cols.size()};
  }
  // The rows and the columns of a rank, in ascending order.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> own(int64_t rank) const {
    const bool by_col = grid.layout == CUBLASMP_GRID_LAYOUT_COL_MAJOR;
    const int64_t p = by_col ? rank % grid.nprow : rank / grid.npcol;
    const int64_t q = by_col ? rank / grid.nprow : rank % grid.npcol;
    std::vector<int64_t> own_rows, own_cols;
    for (int64_t i = 0; i < rows; ++i) {
      if ((i / mb + rsrc) % grid.nprow == p) own_rows.push_back(i);
    }
    for (int64_t j = 0; j < cols; ++j) {
      if ((j / nb + csrc) % grid.npcol == q) own_cols.push_back(j);
    }
    return {own_rows, own_cols};
  }
};

enum class Pattern { kLocal, kAllGather, kReduceScatter, kAllReduce, kGrid, kCyclic };
constexpr const char* kPatternNames[] = {"local", "all-gather", "reduce-scatter", "all-reduce", "grid", "cyclic"};

struct BaseCase {
  Pattern pattern = Pattern::kLocal;
  int p = 1, q = 1;  // q for kGrid and kCyclic
  int64_t m = 1, n = 1, k = 1;
  cublasOperation_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  cudaDataType_t in = CUDA_R_32F, out = CUDA_R_32F;
  int epilog = 0;
  bool has_c = false, is_in_place = false;
  Number alpha = 1, beta = 0;
  int64_t extra_ld = 0;

  int nranks() const { return p * q; }
  std::string name() const {
    const char ops[] = "NTC";
    return std::string(kPatternNames[static_cast<int>(pattern)]) + " " + std::to_string(p) + "x" + std::to_string(q) +
           " m=" + std::to_string(m) + " n=" + std::to_string(n) + " k=" + std::to_string(k) + " " + ops[trans_a] +
           ops[trans_b] + " " + Facts(in).name + "->" + Facts(out).name + " epilog " + std::to_string(epilog);
  }
};

struct Layouts {
  Layout a, b, d;
};

inline int64_t part(int64_t extent, int64_t parts) { return std::max<int64_t>(1, (extent + parts - 1) / parts); }

// cuBLASMp's layouts for the pattern, in terms of op(A), op(B), D; then stored transposed if asked for.
inline Layouts layouts_of(const BaseCase& c) {
  const Grid column{c.nranks(), 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR};
  // One rank has one grid, as in cuBLASMp's samples.
  const Grid row = c.nranks() == 1 ? column : Grid{1, c.nranks(), CUBLASMP_GRID_LAYOUT_ROW_MAJOR};
  const Grid both{c.p, c.q, CUBLASMP_GRID_LAYOUT_COL_MAJOR};
  const int64_t P = c.nranks(), m = std::max<int64_t>(1, c.m), n = std::max<int64_t>(1, c.n);
  const int64_t k = std::max<int64_t>(1, c.k);
  // Rows and columns of op(A), op(B), D, and how each is split: grid for plain, grid for transposed, block of both.
  struct Spec {
    Grid plain, transposed;
    int64_t rows = 0, cols = 0, row_block = 1, col_block = 1, rsrc = 0, csrc = 0;
  };
  Spec a, b, d;
  switch (c.pattern) {
    case Pattern::kLocal:
    case Pattern::kAllGather:
      a = {column, row, c.m, c.k, part(m, P), k, 0, 0};
      b = {row, column, c.k, c.n, k, part(n, P), 0, 0};
      d = {column, column, c.m, c.n, part(m, P), part(n, P), 0, 0};
      break;
    case Pattern::kReduceScatter:
      a = {row, column, c.m, c.k, m, part(k, P), 0, 0};
      b = {column, row, c.k, c.n, part(k, P), part(n, P), 0, 0};
      d = {row, row, c.m, c.n, m, part(n, P), 0, 0};
      break;
    case Pattern::kAllReduce:
      a = {row, column, c.m, c.k, m, part(k, P), 0, 0};
      b = {column, row, c.k, c.n, part(k, P), n, 0, 0};
      d = {row, row, c.m, c.n * P, m, n, 0, 0};
      break;
    case Pattern::kGrid: {
      const bool ta = c.trans_a != CUBLAS_OP_N, tb = c.trans_b != CUBLAS_OP_N;
      a = {both, both, c.m, c.k, part(m, ta ? c.q : c.p), part(k, ta ? c.p : c.q), 0, 0};
      b = {both, both, c.k, c.n, part(k, tb ? c.q : c.p), part(n, tb ? c.p : c.q), 0, 0};
      d = {both, both, c.m, c.n, part(m, c.p), part(n, c.q), 0, 0};
      break;
    }
    case Pattern::kCyclic:  // blocks of 3, 5 and 2, first blocks away from rank 0
      a = {both, both, c.m, c.k, 3, 2, c.p - 1, 0};
      b = {both, both, c.k, c.n, 2, 5, 0, c.q - 1};
      d = {both, both, c.m, c.n, 3, 5, c.p - 1, c.q - 1};
      break;
  }
  const auto store = [](const Spec& s, bool transposed) {
    if (!transposed) return Layout{s.plain, s.rows, s.cols, s.row_block, s.col_block, s.rsrc, s.csrc};
    return Layout{s.transposed, s.cols, s.rows, s.col_block, s.row_block, 0, 0};
  };
  return {store(a, c.trans_a != CUBLAS_OP_N), store(b, c.trans_b != CUBLAS_OP_N), store(d, false)};
}

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_PLACEMENT_H_
