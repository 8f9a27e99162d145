// The distribution of every pattern: local sizes as the Python side allocates them, blocks as cuBLASMp demands them.
#include <string>
#include <utility>
#include <vector>

#include "csrc/plan/distribution.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

Problem Transposed(Attributes attributes, const char* trans_a, const char* trans_b) {
  return *MakeProblem(
      tests::With(std::move(attributes), {{"trans_a", std::string(trans_a)}, {"trans_b", std::string(trans_b)}}));
}

std::string Refusal(const Attributes& attributes) {
  return MakeDistribution(*MakeProblem(attributes)).status().message();
}

void CheckLocal(const MatrixDistribution& matrix, int64_t rows, int64_t cols) {
  CHECK_EQ(matrix.local_rows, rows);
  CHECK_EQ(matrix.local_cols, cols);
}

// cublasmp.h's block contract: the stored blocks that run along m, n and k agree between the matrices that share them.
void CheckBlockContract(const Problem& p, const Distribution& l) {
  const bool a_is_n = p.trans_a == Op::kN, b_is_n = p.trans_b == Op::kN;
  CHECK_EQ(a_is_n ? l.a.row_block : l.a.col_block, l.d.row_block);
  CHECK_EQ(b_is_n ? l.b.col_block : l.b.row_block, l.d.col_block);
  CHECK_EQ(a_is_n ? l.a.col_block : l.a.row_block, b_is_n ? l.b.row_block : l.b.col_block);
}

// numroc of an evenly divided, non-cyclic matrix: one block a process, or the whole where the grid does not split.
void CheckBlocksCoverTheGrid(const MatrixDistribution& matrix, int64_t nranks) {
  if (matrix.grid == GridKind::kColumn) {
    CHECK_EQ(matrix.local_rows * nranks, matrix.rows);
    CHECK_EQ(matrix.local_cols, matrix.cols);
    CHECK_EQ(matrix.row_block, matrix.local_rows);
  } else {
    CHECK(matrix.grid == GridKind::kRow);
    CHECK_EQ(matrix.local_cols * nranks, matrix.cols);
    CHECK_EQ(matrix.local_rows, matrix.rows);
    CHECK_EQ(matrix.col_block, matrix.local_cols);
  }
}

TEST(OneDimensionalPatternsKeepTheContract) {
  for (int64_t nranks : {1, 2, 4}) {
    for (const auto& attributes : {tests::AllGather(nranks, 8, 12, 20), tests::ReduceScatter(nranks, 8, 12, 20),
                                   tests::AllReduce(nranks, 7, 5, 20)}) {
      for (const char* trans_a : {"N", "T", "C"}) {
        for (const char* trans_b : {"N", "T", "C"}) {
          const Problem problem = Transposed(attributes, trans_a, trans_b);
          const StatusOr<Distribution> layout = MakeDistribution(problem);
          CHECK(layout.ok());
          CheckBlockContract(problem, *layout);
          for (const MatrixDistribution* matrix : {&layout->a, &layout->b, &layout->d}) {
            CheckBlocksCoverTheGrid(*matrix, nranks);
          }
        }
      }
    }
  }
}

TEST(GridsKeepTheContractWhereTheyCan) {
  for (const auto& attributes : {tests::Grid(1, 1, 3, 5, 7), tests::Grid(2, 2, 4, 8, 12), tests::Grid(4, 1, 4, 8, 12),
                                 tests::Grid(1, 4, 4, 8, 12)}) {
    for (const char* trans_a : {"N", "T"}) {
      for (const char* trans_b : {"N", "T"}) {
        const Problem problem = Transposed(attributes, trans_a, trans_b);
        CheckBlockContract(problem, *MakeDistribution(problem));
      }
    }
  }
}

TEST(LocalPartsAreThoseOfTheBoundary) {
  const struct {
    Problem problem;
    int64_t a[2], b[2], d[2];  // rows and columns
  } cases[] = {{Transposed(tests::AllGather(4, 8, 12, 20), "N", "T"), {2, 20}, {3, 20}, {2, 12}},
               {Transposed(tests::ReduceScatter(4, 8, 12, 20), "T", "N"), {5, 8}, {5, 12}, {8, 3}},
               {Transposed(tests::AllReduce(4, 7, 5, 20), "N", "N"), {7, 5}, {5, 5}, {7, 5}},
               {Transposed(tests::Grid(2, 3, 6, 12, 18), "T", "N"), {9, 2}, {9, 4}, {3, 4}},
               {Transposed(tests::Local(3, 5, 7), "N", "N"), {3, 7}, {7, 5}, {3, 5}}};
  for (const auto& [problem, a, b, d] : cases) {
    const Distribution layout = *MakeDistribution(problem);
    CheckLocal(layout.a, a[0], a[1]);
    CheckLocal(layout.b, b[0], b[1]);
    CheckLocal(layout.d, d[0], d[1]);
  }
}

// A rank has 17 rows of D. A bias gradient has a number for each of them, or with BGRADB for each of the 6 columns.
TEST(EpilogsSizeTheirBuffers) {
  const struct {
    int64_t epilog;
    const char *bias, *aux, *refusal;
    int64_t bias_size = 0, aux_ld = 0, aux_size = 0;
  } cases[] = {{134, "f32", "u8", "", 17, 128, 16 * 6},
               {164, "f32", "f32", "", 17, 24, 24 * 6},
               {256, "f32", "none", "", 17},
               {512, "f32", "none", "", 6},
               {152, "f32", "u8", "", 17, 128, 16 * 6},
               {164, "f32", "u8", "epilog 164 needs an aux, got dtype_aux u8"},
               {164, "none", "f32", "epilog 164 needs bias, but dtype_bias is none"},
               {256, "none", "none", "epilog 256 needs bias, but dtype_bias is none"},
               {152, "f32", "none", "epilog 152 needs dtype_aux u8, got dtype_aux none"},
               {1, "none", "f32", "ALLREDUCE bit"}};
  for (const auto& x : cases) {
    const Attributes attributes =
        tests::With(tests::AllGather(2, 34, 6, 4),
                    {{"epilog", x.epilog}, {"dtype_bias", std::string(x.bias)}, {"dtype_aux", std::string(x.aux)}});
    CHECK_CONTAINS(Refusal(attributes), x.refusal);
    if (*x.refusal) continue;
    const Distribution layout = *MakeDistribution(*MakeProblem(attributes));
    CHECK_EQ(layout.bias_size, x.bias_size);
    CHECK_EQ(layout.aux.attribute_ld, x.aux_ld);
    CHECK_EQ(layout.aux.local_size, x.aux_size);
    if (x.epilog == 152) {
      CHECK_CONTAINS(Refusal(tests::With(attributes, {{"m", int64_t{0}}})),
                     "epilog 152 sums to a bias gradient, but D has no elements");
    }
  }
}

// 10 rows in blocks of 2 over 2 process rows from row 1: blocks 0, 2, 4 on row 1 (6 rows), 1 and 3 on row 0 (4).
TEST(CyclicLayoutsHoldTheLargestPart) {
  Distribution layout = *MakeDistribution(*MakeProblem(tests::Cyclic(2, 3, 10, 19, 13)));
  CheckLocal(layout.a, 6, 5);  // k: 4 4 4 1 over 3
  CheckLocal(layout.b, 8, 7);  // k: 4 4 4 1 over 2; n: six 3s and a 1 over 3
  CheckLocal(layout.d, 6, 7);
  CHECK_EQ(layout.a.row_block, 2);
  CHECK_EQ(layout.a.col_block, 4);
  CHECK_EQ(layout.a.row_source, 1);
  CHECK_EQ(layout.a.col_source, 0);
  CHECK_EQ(layout.d.row_source, 1);
  CHECK_EQ(layout.d.col_source, 1);
  CHECK(layout.d.grid == GridKind::kProcess);
  layout = *MakeDistribution(*MakeProblem(tests::Cyclic(2, 2, 1, 1, 1)));  // more processes than blocks
  CheckLocal(layout.d, 1, 1);
  for (const bool a_is_n : {true, false}) {
    for (const bool b_is_n : {true, false}) {
      const Problem problem = *MakeProblem(tests::Cyclic(2, 3, 10, 19, 13, a_is_n, b_is_n));
      CheckBlockContract(problem, *MakeDistribution(problem));
    }
  }
  CHECK_EQ(Refusal(tests::With(tests::Cyclic(2, 2, 4, 4, 4), {{"epilog", int64_t{2}}})),
           "jaxmp: block-cyclic layouts take no epilog, got epilog 2");
}

TEST(ExtentsThatDoNotDivideAreNamed) {
  CHECK_EQ(Refusal(tests::AllGather(4, 6, 8, 3)),
           "jaxmp: pattern all_gather needs m to be a multiple of 4, got m=6; pad the operands or choose another mesh");
  CHECK_CONTAINS(Refusal(tests::AllGather(4, 8, 6, 3)), "needs n to be a multiple of 4, got n=6");
  CHECK_CONTAINS(Refusal(tests::ReduceScatter(4, 1, 4, 6)), "got k=6");
  CHECK_CONTAINS(Refusal(tests::AllReduce(3, 1, 1, 4)), "multiple of 3, got k=4");
  CHECK_CONTAINS(Refusal(tests::Grid(2, 3, 2, 3, 4)), "multiple of 3, got k=4");
  CHECK_EQ(Refusal(tests::AllGather(4, 0, 0, 0)), "");
}

}  // namespace
}  // namespace jaxmp
