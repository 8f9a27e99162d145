// Without these a shard could come out in the wrong place, transposed, or from the wrong rank, and look plausible.
// Small integers keep every sum exact, so D is compared bit by bit: every pattern, transposition and type, from empty
// shapes up; and nothing but D is written. Sums in one order have the bits of one rank on any numbers.
#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/hostmp_world.h"
#include "tests/cpp/instruction_set.h"

namespace jaxmp::test {
namespace {

Number rounded(cudaDataType_t type, Number value) {
  std::array<char, 16> bytes;
  encode(type, value, bytes.data());
  return decode(type, bytes.data());
}

bool is_right(const World& world) {
  Matrix product, magnitude;
  multiply(world, &product, &magnitude);
  const Case& c = world.c;
  const int64_t copies = c.pattern == Pattern::kAllReduce ? c.nranks() : 1;
  for (int64_t copy = 0; copy < copies; ++copy) {
    const Matrix d = world.gather(copy);
    for (size_t i = 0; i < d.values.size(); ++i) {
      Number expected = c.alpha * product.values[i];
      if (c.has_c && c.beta != 0.0) expected += c.beta * world.c0.values[i];
      if (d.values[i] != rounded(c.out, expected)) return false;
    }
  }
  return true;
}

void check_case(const Case& c, hostmp::Pool* pool, const std::function<void(World*)>& fill = nullptr) {
  World world(c, fill);
  for (int times = 0; times < 2; ++times) {  // the second time D holds numbers, which must not matter
    if (c.is_in_place && times == 1) break;
    world.run(pool, /*on_threads=*/times == 1);
    for (const std::string& error : world.errors)
      check::report(error.empty(), __FILE__, __LINE__, c.name() + ": " + error);
    check::report(is_right(world), __FILE__, __LINE__, c.name());
    world.check_untouched();
  }
}

struct Types {
  cudaDataType_t in, out;
};
constexpr Types kTypes[] = {{CUDA_R_32F, CUDA_R_32F}, {CUDA_R_64F, CUDA_R_64F},   {CUDA_C_32F, CUDA_C_32F},
                            {CUDA_C_64F, CUDA_C_64F}, {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F},
                            {CUDA_R_16F, CUDA_R_16F}, {CUDA_R_16F, CUDA_R_32F}};
constexpr cublasOperation_t kOps[] = {CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C};

std::vector<Case> patterns() {
  std::vector<Case> cases;
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}) {
    for (int ranks : {1, 2, 3, 4}) cases.push_back({pattern, ranks, 1});
  }
  cases.push_back({Pattern::kLocal, 1, 1});
  for (Pattern pattern : {Pattern::kGrid, Pattern::kCyclic}) {
    cases.push_back({pattern, 2, 2});
  }
  cases.push_back({Pattern::kGrid, 2, 3});
  cases.push_back({Pattern::kGrid, 3, 1});
  return cases;
}

// Every pattern with every transposition and type, on odd shapes that no number of ranks divides.
void test_patterns(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    for (const Types& types : kTypes) {
      for (cublasOperation_t trans_a : kOps) {
        for (cublasOperation_t trans_b : kOps) {
          const bool is_transposed = trans_a != CUBLAS_OP_N || trans_b != CUBLAS_OP_N;
          if (c.pattern == Pattern::kCyclic && is_transposed) continue;  // its sources are those of NN
          c.m = 13, c.n = 11, c.k = 17;
          c.trans_a = trans_a, c.trans_b = trans_b, c.in = types.in, c.out = types.out;
          check_case(c, pool);
        }
      }
    }
  }
}

void test_shapes(hostmp::Pool* pool) {
  const int64_t shapes[][3] = {{1, 1, 1}, {2, 2, 2}, {4, 4, 4}, {5, 1, 7},    {1, 9, 1},    {8, 8, 0},
                               {0, 4, 4}, {4, 0, 4}, {0, 0, 0}, {64, 48, 80}, {33, 65, 17}, {130, 260, 70}};
  for (Case c : patterns()) {
    for (const auto& [m, n, k] : shapes) {
      for (const Types& types : {Types{CUDA_R_32F, CUDA_R_32F}, Types{CUDA_R_16BF, CUDA_R_16BF}}) {
        c.m = m, c.n = n, c.k = k, c.in = types.in, c.out = types.out;
        check_case(c, pool);
      }
    }
  }
}

// Many tiles, k deeper than a panel, leading dimensions with a gap.
void test_large(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    if (c.nranks() == 3) continue;
    if (check::kIsSlow && c.pattern != Pattern::kAllGather && c.pattern != Pattern::kAllReduce) continue;
    for (const Types& types :
         {Types{CUDA_R_32F, CUDA_R_32F}, Types{CUDA_R_16BF, CUDA_R_16BF}, Types{CUDA_R_16F, CUDA_R_32F}}) {
      c.m = 131, c.n = 260, c.k = 1101, c.in = types.in, c.out = types.out, c.extra_ld = 5;
      if (c.pattern != Pattern::kCyclic) c.trans_a = CUBLAS_OP_T;
      if (c.pattern == Pattern::kCyclic) c.m = 31, c.n = 33, c.k = 37;
      check_case(c, pool);
    }
  }
}

// D = alpha A B + beta C; in place; and with beta = 0, where C holds NaN and must not be read.
void test_scalars(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    for (const Types& types : kTypes) {
      c.m = 12, c.n = 24, c.k = 36, c.in = types.in, c.out = types.out, c.has_c = true;
      c.alpha = Facts(types.in).is_complex ? Number(2, -1) : Number(-2);
      c.beta = Facts(types.in).is_complex ? Number(1, 3) : Number(3);
      check_case(c, pool);
      c.is_in_place = true;
      check_case(c, pool);
      c.is_in_place = false;
      c.k = 0;
      check_case(c, pool);
    }
  }
}

// Compute types that let operands be rounded; k deeper than a panel.
void test_other_compute_types(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    if (c.nranks() == 3) continue;
    for (cublasComputeType_t compute : {CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_16BF,
                                        CUBLAS_COMPUTE_32F_FAST_16F, CUBLAS_COMPUTE_32F_EMULATED_16BFX9}) {
      for (cudaDataType_t type : {CUDA_R_32F, CUDA_C_32F}) {
        const bool is_plain = type == CUDA_R_32F || c.pattern == Pattern::kCyclic;
        c.m = 21, c.n = 35, c.k = 613, c.in = c.out = type, c.single = compute;
        c.trans_a = c.trans_b = is_plain ? CUBLAS_OP_N : CUBLAS_OP_C;
        check_case(c, pool);
      }
    }
  }
}

// A wide operand beside each narrow one, on either side: decoded block by block, wherever its numbers begin in a byte.
constexpr cudaDataType_t kNarrow[] = {CUDA_R_8I,
                                      CUDA_R_8U,
                                      host_types::kS4,
                                      host_types::kU4,
                                      CUDA_R_8F_E4M3,
                                      CUDA_R_8F_E5M2,
                                      CUDA_R_4F_E2M1,
                                      host_types::kE3M4,
                                      host_types::kE4M3Ieee,
                                      host_types::kE4M3B11Fnuz,
                                      host_types::kE4M3Fnuz,
                                      host_types::kE5M2Fnuz,
                                      host_types::kE8M0};
constexpr cudaDataType_t kWide[] = {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};

// What the narrow type has: of unsigned ones no sign, of exponents powers of two.
void fit_narrow(World* world) {
  for (const auto& [matrix, type] : {std::pair(&world->a, world->c.in), std::pair(&world->b, world->c.type_b())}) {
    for (Number& x : matrix->values) {
      if (type == CUDA_R_8U || type == host_types::kU4) x = std::abs(x.real());
      if (type == host_types::kE8M0) x = std::exp2(x.real());
    }
  }
}

template <typename Function>
void for_mixed_types(Case c, Function function) {
  for (cudaDataType_t narrow : kNarrow) {
    for (cudaDataType_t wide : kWide) {
      for (cudaDataType_t out : {wide, CUDA_R_32F}) {
        c.out = out;
        c.in = narrow, c.in_b = wide;
        function(c);
        c.in = wide, c.in_b = narrow;
        function(c);
      }
    }
  }
}

void test_mixed_types(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    if (check::kIsSlow && c.pattern != Pattern::kAllGather && c.pattern != Pattern::kAllReduce) continue;
    const bool is_first = c.pattern == Pattern::kAllGather && c.nranks() == 2;
    for (cublasOperation_t trans_a : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      for (cublasOperation_t trans_b : {CUBLAS_OP_N, CUBLAS_OP_T}) {
        if ((check::kIsSlow || c.pattern == Pattern::kCyclic) && (trans_a != CUBLAS_OP_N || trans_b != CUBLAS_OP_N)) {
          continue;
        }
        c.trans_a = trans_a, c.trans_b = trans_b;
        c.m = 13, c.n = 11, c.k = 17;
        for_mixed_types(c, [&](const Case& mixed) { check_case(mixed, pool, fit_narrow); });
        if (!is_first) continue;
        // Several blocks of rows and of k; few columns and many; 600 is beyond any kernel's.
        c.has_c = true, c.beta = 3, c.extra_ld = 1;
        for (const auto& [m, n, k] : {std::array{1101, 3, 1031}, std::array{39, 600, 1031}, std::array{70, 40, 515}}) {
          if (check::kIsSlow && n != 40) continue;
          c.m = m, c.n = n, c.k = k, c.fixed_reduction_order = n == 40;
          for (cudaDataType_t narrow : {CUDA_R_8I, host_types::kU4}) {
            for (cudaDataType_t wide : kWide) {
              c.in = narrow, c.in_b = wide, c.out = wide;
              check_case(c, pool, fit_narrow);
              c.in = wide, c.in_b = narrow;
              check_case(c, pool, fit_narrow);
            }
          }
        }
        c.has_c = false, c.beta = 0, c.extra_ld = 0, c.fixed_reduction_order = false;
      }
    }
  }
}

// In one order, a mixed product has the bits of the same one in the wide type, on any mesh.
void test_mixed_bits(hostmp::Pool* pool) {
  const auto fill = [](World* world) {
    std::mt19937 random(1);
    std::normal_distribution<double> draw;
    for (Number& x : world->b.values) x = draw(random);
    std::uniform_int_distribution<int> digit(-8, 7);
    for (Number& x : world->a.values) x = digit(random);
  };
  for (cudaDataType_t wide : kWide) {
    for (cudaDataType_t narrow : {CUDA_R_8I, host_types::kS4}) {
      for (cublasOperation_t op : {CUBLAS_OP_N, CUBLAS_OP_T}) {
        const auto run = [&](Case c, cudaDataType_t of_a) {
          c.m = 13, c.n = 19, c.k = 2341, c.fixed_reduction_order = true;
          c.trans_a = c.trans_b = op, c.in = of_a, c.out = CUDA_R_32F;
          if (of_a != wide) c.in_b = wide;
          World world(c, fill);
          world.run(pool);
          world.check_untouched();
          return world.gather().values;
        };
        const auto expected = run({}, wide);
        for (const Case& c : patterns()) {
          if (c.pattern == Pattern::kCyclic && op != CUBLAS_OP_N) continue;
          check::report(run(c, narrow) == expected, __FILE__, __LINE__, c.name() + " mixed, in one order");
        }
      }
    }
  }
}

void test_beta_zero_never_reads_c(hostmp::Pool* pool) {
  for (Case c : patterns()) {
    for (const Types& types : kTypes) {
      c.m = 12, c.n = 24, c.k = 36, c.in = types.in, c.out = types.out, c.has_c = true, c.beta = 0;
      World world(c);
      for (Rank& rank : world.ranks) {
        const int64_t size = Facts(c.out).bytes;
        for (size_t at = 0; at < rank.c->size(); at += static_cast<size_t>(size)) {
          encode(c.out, {NAN, Facts(c.out).is_complex ? double(NAN) : 0}, rank.c->get() + at);
          std::memcpy(rank.d->get() + at, rank.c->get() + at, static_cast<size_t>(size));  // nor D
        }
      }
      world.run(pool);
      check::report(is_right(world), __FILE__, __LINE__, c.name() + " with C = NaN");
    }
  }
}

// k of several K blocks, cut inside of them, in blocks of 2 at the finest; the workspace holds what is copied together.
void test_ordered_bits_do_not_know_the_mesh(hostmp::Pool* pool) {
  const auto fill = [](World* world) {
    std::mt19937 random(1);
    std::normal_distribution<double> draw;
    for (Matrix* matrix : {&world->a, &world->b}) {
      for (Number& x : matrix->values) x = {draw(random), Facts(world->c.in).is_complex ? draw(random) : 0};
    }
  };
  for (const Types& types : kTypes) {
    for (cublasOperation_t op : {CUBLAS_OP_N, CUBLAS_OP_C}) {
      const auto run = [&](Case c) {
        c.m = 13, c.n = 19, c.k = 2341, c.fixed_reduction_order = true;
        c.trans_a = c.trans_b = op, c.in = types.in, c.out = types.out;
        auto world = std::make_unique<World>(c, fill);
        world->run(pool);
        world->check_untouched();
        return world;
      };
      const Matrix expected = run({})->gather();
      for (const Case& c : patterns()) {
        if (c.pattern == Pattern::kCyclic && op != CUBLAS_OP_N) continue;
        const auto world = run(c);
        check::report(world->gather().values == expected.values, __FILE__, __LINE__, world->c.name() + " in one order");
      }
    }
  }
}

}  // namespace
}  // namespace jaxmp::test

int main() {
  using namespace jaxmp;  // NOLINT
  tests::LimitInstructionSet();
  CHECK_EQ(hostmp::LoadBlas(check::environment("JAXMP_BLAS")).message(), "");
  test::Threads pool(3);
  test::test_patterns(&pool);
  if (!check::kIsSlow) test::test_patterns(nullptr);
  test::test_shapes(&pool);
  test::test_large(&pool);
  test::test_scalars(&pool);
  test::test_other_compute_types(&pool);
  test::test_ordered_bits_do_not_know_the_mesh(&pool);
  test::test_beta_zero_never_reads_c(&pool);
  test::test_mixed_types(&pool);
  test::test_mixed_bits(&pool);
  return check::summary("hostmp_placement");
}
