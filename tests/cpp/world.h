// The ranks of one group with their parts of small-integer matrices, so that products are exact and compared to the
// bit.
#ifndef JAXMP_TESTS_WORLD_H_
#define JAXMP_TESTS_WORLD_H_

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "csrc/plan/distribution.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp::tests {

// f32 matrices of one problem, cut into the ranks' parts by its layout. D starts as NaN: an unwritten element differs
// from every answer; C, if there is one, is in D's memory. If a rank holds less than the largest block-cyclic part,
// elements beyond the matrix stand for the padding, which must not be read or written.
struct World {
  explicit World(const Problem& problem, int salt = 0)
      : problem(problem), layout(*MakeDistribution(problem)), salt(salt) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int rank = 0; rank < problem.nranks(); ++rank) {
      a.push_back(Part(layout.a, rank, [this](int64_t i, int64_t j) { return A(i, j); }));
      b.push_back(Part(layout.b, rank, [this](int64_t i, int64_t j) { return B(i, j); }));
      d.push_back(Part(layout.d, rank, [this, nan](int64_t i, int64_t j) { return adds_c() ? C(i, j) : nan; }));
    }
  }

  // Stored elements of A and B.
  float A(int64_t i, int64_t j) const { return Element(layout.a, i, j, (i * 7 + j * 3 + salt) % 5 - 2); }
  float B(int64_t i, int64_t j) const { return Element(layout.b, i, j, (i * 2 + j * 5 + salt) % 7 - 3); }
  float C(int64_t i, int64_t j) const { return Element(layout.d, i, j, (i * 3 + j % problem.n * 4) % 7 - 3); }
  bool adds_c() const { return problem.has_c() && problem.beta != 0.0; }
  static float Element(const MatrixDistribution& matrix, int64_t i, int64_t j, int64_t value) {
    const bool is_padding = i >= matrix.rows || j >= matrix.cols;
    return is_padding ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(value);
  }

  std::vector<float> Expected(int rank) const {
    return Part(layout.d, rank, [this](int64_t i, int64_t j) {
      float sum = adds_c() ? static_cast<float>(problem.beta.real()) * C(i, j) : Element(layout.d, i, j, 0);
      for (int64_t l = 0; l < problem.k; ++l) {
        const int64_t column = j % problem.n;  // an all-reduce lays copies of D side by side
        sum +=
            (problem.trans_a == Op::kN ? A(i, l) : A(l, i)) * (problem.trans_b == Op::kN ? B(l, column) : B(column, l));
      }
      return sum;
    });
  }

  bool IsRight() const {
    for (int rank = 0; rank < problem.nranks(); ++rank) {
      const std::vector<float>& got = d[static_cast<size_t>(rank)];
      const std::vector<float> expected = Expected(rank);
      for (size_t i = 0; i < got.size(); ++i) {
        const bool is_unwritten = std::isnan(expected[i]) && std::isnan(got[i]);
        if (got[i] != expected[i] && !is_unwritten) return false;
      }
    }
    return true;
  }

  std::vector<float> Part(const MatrixDistribution& matrix, int rank,
                          const std::function<float(int64_t, int64_t)>& element) const {
    const int64_t nprow = matrix.grid == GridKind::kColumn ? problem.nranks()
                          : matrix.grid == GridKind::kRow  ? 1
                                                           : problem.nprow();
    const int64_t prow = rank % nprow, pcol = rank / nprow;
    std::vector<float> part;
    for (int64_t j = 0; j < matrix.local_cols; ++j) {
      for (int64_t i = 0; i < matrix.local_rows; ++i) {
        part.push_back(
            element(Global(i, prow, matrix.local_rows, matrix.row_block, nprow, matrix.row_source),
                    Global(j, pcol, matrix.local_cols, matrix.col_block, problem.nranks() / nprow, matrix.col_source)));
      }
    }
    return part;
  }

  // The global index of a local one.
  int64_t Global(int64_t index, int64_t proc, int64_t part, int64_t block, int64_t nprocs, int64_t source) const {
    if (!problem.is_block_cyclic()) return proc * part + index;
    return (index / block * nprocs + (proc + nprocs - source) % nprocs) * block + index % block;
  }

  const Problem problem;
  const Distribution layout;
  const int salt;
  std::vector<std::vector<float>> a, b, d;  // by rank, column-major
};

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_WORLD_H_
