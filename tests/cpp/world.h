// The ranks of one group with their parts of small-integer matrices, so that products are exact and compared to the
// bit.
#ifndef JAXMP_TESTS_WORLD_H_
#define JAXMP_TESTS_WORLD_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "csrc/plan_layout.h"
#include "csrc/problem.h"

namespace jaxmp::tests {

// f32 matrices of one problem, cut into the ranks' parts as its layout says. D starts as NaN: an element that nobody
// writes differs from every answer.
struct World {
  explicit World(const Problem& problem, int salt = 0) : problem(problem), layout(*MakeLayout(problem)), salt(salt) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int rank = 0; rank < problem.nranks(); ++rank) {
      a.push_back(Part(layout.a, rank, [this](int64_t i, int64_t j) { return A(i, j); }));
      b.push_back(Part(layout.b, rank, [this](int64_t i, int64_t j) { return B(i, j); }));
      d.push_back(Part(layout.d, rank, [nan](int64_t, int64_t) { return nan; }));
    }
  }

  // Stored elements of A and B.
  float A(int64_t i, int64_t j) const { return static_cast<float>((i * 7 + j * 3 + salt) % 5 - 2); }
  float B(int64_t i, int64_t j) const { return static_cast<float>((i * 2 + j * 5 + salt) % 7 - 3); }

  std::vector<float> Expected(int rank) const {
    return Part(layout.d, rank, [this](int64_t i, int64_t j) {
      float sum = 0;
      for (int64_t l = 0; l < problem.k; ++l) {
        const int64_t column = j % problem.n;  // an all-reduce lays copies of D side by side
        sum +=
            (problem.trans_a == Op::kN ? A(i, l) : A(l, i)) * (problem.trans_b == Op::kN ? B(l, column) : B(column, l));
      }
      return sum;
    });
  }

  bool IsRight() const {
    bool is_right = true;
    for (int rank = 0; rank < problem.nranks(); ++rank) is_right &= d[static_cast<size_t>(rank)] == Expected(rank);
    return is_right;
  }

  std::vector<float> Part(const MatrixLayout& matrix, int rank,
                          const std::function<float(int64_t, int64_t)>& element) const {
    const int64_t nprow = matrix.grid == GridKind::kColumn ? problem.nranks()
                          : matrix.grid == GridKind::kRow  ? 1
                                                           : problem.nprow();
    const int64_t prow = rank % nprow, pcol = rank / nprow;
    std::vector<float> part;
    for (int64_t j = 0; j < matrix.local_cols; ++j) {
      for (int64_t i = 0; i < matrix.local_rows; ++i) {
        part.push_back(element(prow * matrix.local_rows + i, pcol * matrix.local_cols + j));
      }
    }
    return part;
  }

  const Problem problem;
  const Layout layout;
  const int salt;
  std::vector<std::vector<float>> a, b, d;  // by rank, column-major
};

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_WORLD_H_
