// X X^T: which tiles are computed if A and B are one matrix, and that D is symmetric to the bit.
#include <random>

#include "csrc/hostmp/exec/tile_task.h"
#include "csrc/hostmp/tiling/tiling.h"
#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

using hostmp::Axis;
using hostmp::MatmulCall;
using hostmp::Tile;
using hostmp::Tiling;

TEST(LoadsTheBlas) { check::load_blas(); }

// X X^T on one process.
MatmulCall square(int64_t n, int64_t k) {
  MatmulCall call;
  call.m = call.n = n, call.k = k;
  call.trans_b = CUBLAS_OP_T;
  for (hostmp::Operand* x : {&call.a, &call.b, &call.d}) {
    x->desc = {
        {n, n, 1, 0}, {x == &call.d ? n : k, k, 1, 0}, n, CUDA_R_32F, {1, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR, {}}};
  }
  return call;
}

// Checks that each element of D is written once. Returns the part of D that is computed.
double coverage(const MatmulCall& call, const Tiling& tiling) {
  std::vector<int> writes(static_cast<size_t>(call.m * call.n));
  double computed = 0;
  for (const Tile& tile : tiling.tiles) {
    const int64_t first_row = tiling.m[static_cast<size_t>(tile.m_range)].begin + tile.row;
    const int64_t first_col = tiling.n[static_cast<size_t>(tile.n_range)].begin + tile.col;
    computed += static_cast<double>(tile.rows * tile.cols);
    for (int64_t row = first_row; row < first_row + tile.rows; ++row) {
      for (int64_t col = first_col; col < first_col + tile.cols; ++col) {
        ++writes[static_cast<size_t>(row * call.n + col)];
        if (first_row != first_col) ++writes[static_cast<size_t>(col * call.n + row)];
      }
    }
  }
  CHECK(std::all_of(writes.begin(), writes.end(), [](int count) { return count == 1; }));
  return computed / static_cast<double>(call.m * call.n);
}

TEST(test_each_pair_of_elements_is_computed_once) {
  for (const int64_t n : {129, 130, 255, 301, 512, 2048}) {
    for (const int64_t k : {0, 1, 8, 512, 4096}) {
      const MatmulCall call = square(n, k);
      const double part = coverage(call, hostmp::MakeSymmetricTiling(call));
      CHECK(part < (n >= 512 ? 0.63 : 0.8));
      if (n == 2048) CHECK(part < 0.54);
    }
  }
}

// m is cut along A, n along B and D: the tiles are within the ranges of all of them.
TEST(test_ranks_cut_m_and_n_alike) {
  for (const int64_t n : {515, 1200}) {
    for (const int64_t ranks : {2, 3, 4}) {
      MatmulCall call = square(n, 64);
      const Axis cut = {n, hostmp::CeilDiv(n, ranks), ranks, 0};
      call.d.desc.cols = {n, n / 2 + 9, 2, 0};
      const auto check = [&] {
        const Tiling tiling = hostmp::MakeSymmetricTiling(call);
        CHECK(coverage(call, tiling) < 0.75);
        CHECK_EQ(tiling.m.size(), tiling.n.size());
        for (size_t i = 0; i < std::min(tiling.m.size(), tiling.n.size()); ++i) {
          CHECK_EQ(tiling.m[i].begin, tiling.n[i].begin);
          CHECK_EQ(tiling.m[i].local[1], tiling.m[i].begin - tiling.m[i].proc[1] * call.a_m().block);
          CHECK_EQ(tiling.n[i].local[0], tiling.n[i].begin - tiling.n[i].proc[0] * call.d.desc.cols.block);
        }
        for (const Tile& tile : tiling.tiles) {
          CHECK(tile.row + tile.rows <= tiling.m[static_cast<size_t>(tile.m_range)].size);
          CHECK(tile.col + tile.cols <= tiling.n[static_cast<size_t>(tile.n_range)].size);
        }
      };
      check();
      call.a.desc.rows = call.b.desc.rows = cut;
      check();
    }
  }
}

TEST(test_other_products_have_no_symmetric_tiling) {
  const auto has_none = [](const char* what, const auto& change) {
    MatmulCall call = square(512, 64);
    change(call);
    check::report(hostmp::MakeSymmetricTiling(call).tiles.empty(), __FILE__, __LINE__, what);
  };
  has_none("X X", [](MatmulCall& call) { call.trans_b = CUBLAS_OP_N; });
  has_none("with C", [](MatmulCall& call) { call.has_c = true; });
  has_none("complex", [](MatmulCall& call) { call.a.desc.type = call.b.desc.type = CUDA_C_32F; });
  has_none("integers", [](MatmulCall& call) { call.a.desc.type = call.b.desc.type = CUDA_R_8I; });
  has_none("of two types", [](MatmulCall& call) { call.a.desc.type = CUDA_R_16BF; });
  has_none("of other submatrices", [](MatmulCall& call) { call.a.col = 1; });
  has_none("distributed otherwise", [](MatmulCall& call) { call.a.desc.cols = {64, 32, 2, 0}; });
  has_none("in small pieces", [](MatmulCall& call) { call.a.desc.rows = call.b.desc.rows = {512, 16, 2, 0}; });
}

TEST(test_every_rank_must_bring_one_matrix) {
  const auto tiling = std::make_shared<hostmp::ProductTiling>();
  tiling->symmetric = hostmp::MakeSymmetricTiling(square(512, 64));
  const char memory[2] = {};
  MatmulCall first = square(512, 64);
  first.a.data = first.b.data = memory;
  first.tiling = tiling;
  MatmulCall second = first;
  CHECK(hostmp::IsOneMatrix({&first, &second}));
  second.b.data = memory + 1;
  CHECK(!hostmp::IsOneMatrix({&first, &second}));
  second.b = second.a;
  second.b.desc.lld += 1;
  CHECK(!hostmp::IsOneMatrix({&first, &second}));
  hostmp::DistributedProduct product{{&first}, /*is_one_matrix=*/true};
  CHECK(product.is_mirrored());
  first.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU;
  CHECK(!product.is_mirrored());
}

// D is symmetric, and integers have the sums that another matrix of the same numbers gives.
void check_bits(Case c, bool is_random) {
  c.is_random = is_random;
  c.fill = [](Operands& x) { x.b.values = x.a.values; };
  World world(c);
  Threads pool(1);
  world.run(&pool);
  const Matrix two = world.gather();
  for (conformance::Call& call : world.calls) call.b = call.a;
  world.run(&pool, /*on_threads=*/true);
  const Matrix one = world.gather();
  for (const std::string& error : world.errors) CHECK_EQ(error, "");
  if (!is_random) check::report(one.values == two.values, __FILE__, __LINE__, c.name());
  bool is_symmetric = true;
  for (int64_t j = 0; j < c.n; ++j) {
    for (int64_t i = 0; i < j; ++i) is_symmetric &= one.at(i, j) == one.at(j, i);
  }
  check::report(is_symmetric, __FILE__, __LINE__, c.name() + " is not symmetric");
}

TEST(test_products_with_the_own_transpose_are_symmetric) {
  for (const auto& [in, out] : conformance::kTypes) {
    if (Facts(in).is_complex) continue;
    for (const bool is_first : {true, false}) {
      for (const int64_t k : {0, 77, 1100}) {
        for (Case c : conformance::layouts_on("symmetric", 4, in, out)) {
          if (c.pattern == Pattern::kCyclic) continue;
          c.m = c.n = 268, c.k = k;
          (is_first ? c.trans_a : c.trans_b) = CUBLAS_OP_T;
          c.alpha = k == 77 ? -2 : 1;
          check_bits(c, /*is_random=*/k != 77);
        }
        if (check::kIsSlow) break;
      }
    }
  }
}

}  // namespace
}  // namespace jaxmp::test
