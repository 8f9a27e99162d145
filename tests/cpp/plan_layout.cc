// The distribution of every pattern: local sizes as the Python side allocates them, blocks as cuBLASMp demands them.
#include <string>
#include <vector>

#include "csrc/plan/distribution.h"
#include "tests/cpp/check.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

Problem Transposed(Attributes attributes, const char* trans_a, const char* trans_b) {
  attributes["trans_a"] = std::string(trans_a);
  attributes["trans_b"] = std::string(trans_b);
  return *MakeProblem(attributes);
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
  Distribution layout = *MakeDistribution(Transposed(tests::AllGather(4, 8, 12, 20), "N", "T"));
  CheckLocal(layout.a, 2, 20);
  CheckLocal(layout.b, 3, 20);
  CheckLocal(layout.d, 2, 12);
  layout = *MakeDistribution(Transposed(tests::ReduceScatter(4, 8, 12, 20), "T", "N"));
  CheckLocal(layout.a, 5, 8);
  CheckLocal(layout.b, 5, 12);
  CheckLocal(layout.d, 8, 3);
  layout = *MakeDistribution(Transposed(tests::AllReduce(4, 7, 5, 20), "N", "N"));
  CheckLocal(layout.a, 7, 5);
  CheckLocal(layout.b, 5, 5);
  CheckLocal(layout.d, 7, 5);
  layout = *MakeDistribution(Transposed(tests::Grid(2, 3, 6, 12, 18), "T", "N"));
  CheckLocal(layout.a, 9, 2);
  CheckLocal(layout.b, 9, 4);
  CheckLocal(layout.d, 3, 4);
  layout = *MakeDistribution(*MakeProblem(tests::Local(3, 5, 7)));
  CheckLocal(layout.a, 3, 7);
  CheckLocal(layout.b, 7, 5);
  CheckLocal(layout.d, 3, 5);
}

TEST(EpilogsSizeTheirBuffers) {
  Attributes attributes = tests::AllGather(2, 34, 6, 4);
  attributes["epilog"] = int64_t{134};  // RELU_AUX_BIAS
  attributes["dtype_bias"] = std::string("f32");
  attributes["dtype_aux"] = std::string("u8");
  Distribution layout = *MakeDistribution(*MakeProblem(attributes));
  CHECK_EQ(layout.bias_size, 17);
  CHECK_EQ(layout.aux.attribute_ld, 128);
  CHECK_EQ(layout.aux.local_size, 16 * 6);
  attributes["epilog"] = int64_t{164};  // GELU_AUX_BIAS
  CHECK_CONTAINS(Refusal(attributes), "epilog 164 needs an aux, got dtype_aux u8");
  attributes["dtype_aux"] = std::string("f32");
  layout = *MakeDistribution(*MakeProblem(attributes));
  CHECK_EQ(layout.aux.attribute_ld, 24);
  CHECK_EQ(layout.aux.local_size, 24 * 6);
  attributes["dtype_bias"] = std::string("none");
  CHECK_CONTAINS(Refusal(attributes), "epilog 164 needs bias, but dtype_bias is none");
  attributes["epilog"] = int64_t{1};
  CHECK_CONTAINS(Refusal(attributes), "ALLREDUCE bit");
}

TEST(BiasGradientsAreSizedByWhatIsSummed) {
  Attributes attributes = tests::AllGather(2, 34, 6, 4);
  attributes["epilog"] = int64_t{256};  // BGRADA: the local rows of D
  CHECK_CONTAINS(Refusal(attributes), "epilog 256 needs bias, but dtype_bias is none");
  attributes["dtype_bias"] = std::string("f32");
  CHECK_EQ(MakeDistribution(*MakeProblem(attributes))->bias_size, 17);
  attributes["epilog"] = int64_t{512};  // BGRADB: all of n, on every rank
  CHECK_EQ(MakeDistribution(*MakeProblem(attributes))->bias_size, 6);
  attributes["epilog"] = int64_t{152};  // DRELU_BGRAD
  CHECK_CONTAINS(Refusal(attributes), "epilog 152 needs dtype_aux u8, got dtype_aux none");
  attributes["dtype_aux"] = std::string("u8");
  const Distribution layout = *MakeDistribution(*MakeProblem(attributes));
  CHECK_EQ(layout.bias_size, 17);
  CHECK_EQ(layout.aux.local_size, 16 * 6);
  attributes["m"] = int64_t{0};
  CHECK_CONTAINS(Refusal(attributes), "epilog 152 sums to a bias gradient, but D has no elements");
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
  Attributes attributes = tests::Cyclic(2, 2, 4, 4, 4);
  attributes["epilog"] = int64_t{2};
  CHECK_EQ(Refusal(attributes), "jaxmp: block-cyclic layouts take no epilog, got epilog 2");
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
