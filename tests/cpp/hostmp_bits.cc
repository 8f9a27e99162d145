// Sums have the bits of one rank on any numbers: in one order on every mesh, bias gradients always, and a product on
// every number of threads.
#include <random>

#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

Case on_grid(Pattern pattern, int p, int q) {
  Case c = make_case("", pattern, p * q);
  c.p = p, c.q = q;
  return c;
}

std::vector<Case> layouts() {
  std::vector<Case> cases = {make_case("", Pattern::kLocal, 1)};
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}) {
    for (int ranks : {1, 2, 3, 4}) cases.push_back(make_case("", pattern, ranks));
  }
  for (const auto& [p, q] : {std::pair(2, 2), {2, 3}, {3, 1}, {1, 3}}) cases.push_back(on_grid(Pattern::kGrid, p, q));
  cases.push_back(on_grid(Pattern::kCyclic, 2, 2));
  return cases;
}

// D of each layout. k has several K blocks and is cut inside of them, in blocks of 2 at the finest.
void check_same_everywhere(cublasOperation_t op, const std::function<void(Case*)>& set, const Matrix* expected) {
  Matrix first;
  Threads pool(3);
  for (Case c : layouts()) {
    if (c.pattern == Pattern::kCyclic && op != CUBLAS_OP_N) continue;
    c.m = 13, c.n = 19, c.k = 2341, c.fixed_reduction_order = c.is_random = true;
    c.trans_a = c.trans_b = op;
    set(&c);
    World world(c);
    world.run(&pool);
    const Matrix d = world.gather();
    if (!expected) first = d, expected = &first;
    check::report(d.values == expected->values, __FILE__, __LINE__, c.name());
  }
}

TEST(test_ordered_bits_do_not_know_the_mesh) {
  for (const auto& [in, out] : conformance::kTypes) {
    for (cublasOperation_t op : {CUBLAS_OP_N, CUBLAS_OP_C}) {
      check_same_everywhere(
          op,
          [in = in, out = out](Case* c) {
            c->in = c->in_b = in, c->out = c->c_type = out, c->compute = make_case("", Pattern::kLocal, 1, in).compute;
          },
          nullptr);
    }
  }
}

// In one order, a mixed product has the bits of the same one in the wide type, on any mesh.
TEST(test_mixed_bits) {
  const auto fill = [](Operands& x) {
    std::mt19937 random(1);
    std::uniform_int_distribution<int> digit(-8, 7);
    for (Number& value : x.a.values) value = digit(random);
  };
  for (cudaDataType_t wide : {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F}) {
    for (cublasOperation_t op : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      const auto typed = [&](cudaDataType_t a) {
        return [&fill, a, wide](Case* c) { c->in = a, c->in_b = wide, c->fill = fill; };
      };
      Case c = product(Pattern::kLocal, 1, 13, 19, 2341);
      c.fixed_reduction_order = c.is_random = true, c.trans_a = c.trans_b = op;
      typed(wide)(&c);
      World world(c);
      world.run(nullptr);
      const Matrix expected = world.gather();
      for (cudaDataType_t narrow : {CUDA_R_8I, host_types::kS4}) check_same_everywhere(op, typed(narrow), &expected);
    }
  }
}

// The bias gradient by row of D, or by column for BGRADB.
std::vector<Number> gradient_of(World& world) {
  const Case& c = world.c;
  const bool is_of_b = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
  for (int rank = 0; rank < c.nranks(); ++rank) CHECK(world.buffers(rank).read().ok());
  std::vector<Number> sums;
  for (int64_t i = 0; i < (is_of_b ? c.n : c.m); ++i) {
    const int rank = is_of_b ? 0 : static_cast<int>(world.buffers(0).layouts.d.owner(i, 0));
    Buffers& x = world.buffers(rank);
    sums.push_back(decode(c.out, x.gradient.after() + 4 * (is_of_b ? i : x.layouts.d.local_row(i))));
  }
  return sums;
}

Case with_gradient(Case c, int epilog, int64_t m, int64_t n, int64_t k) {
  c.m = m, c.n = n, c.k = k, c.epilog = epilog, c.is_random = true;
  if (epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB) c.trans_b = CUBLAS_OP_T;
  return c;
}

TEST(test_gradients_do_not_know_the_mesh) {
  Threads pool(2);
  for (const int epilog : {CUBLASMP_MATMUL_EPILOGUE_BGRADA, CUBLASMP_MATMUL_EPILOGUE_BGRADB}) {
    std::vector<Number> first;
    int number = 0;
    for (const Case& layout : layouts()) {
      if (layout.pattern == Pattern::kCyclic) continue;
      World world(with_gradient(layout, epilog, 90, 66, 600));
      world.run(number++ % 2 ? &pool : nullptr);
      const std::vector<Number> sums = gradient_of(world);
      if (first.empty()) first = sums;
      check::report(sums == first, __FILE__, __LINE__, world.c.name());
    }
  }
}

// D is summed in chunks of 64 columns, added in order, no matter which rank sums which chunk.
TEST(test_gradients_of_d_are_summed_in_chunks) {
  Threads pool(2);
  for (const Case& layout : layouts()) {
    if (layout.pattern == Pattern::kCyclic) continue;
    World world(with_gradient(layout, CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD, 530, 1100, 64));
    world.run(&pool);
    const Matrix d = world.gather();
    std::vector<Number> expected;
    for (int64_t i = 0; i < world.c.m; ++i) {
      float sum = 0;
      for (int64_t begin = 0; begin < world.c.n; begin += 64) {
        float chunk = 0;
        for (int64_t j = begin; j < std::min(begin + 64, world.c.n); ++j)
          chunk += static_cast<float>(d.at(i, j).real());
        sum += chunk;
      }
      expected.push_back(sum);
    }
    check::report(gradient_of(world) == expected, __FILE__, __LINE__, world.c.name());
  }
}

// The same bits for any number of helping threads.
TEST(test_bits_do_not_depend_on_threads) {
  for (cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF, CUDA_C_32F}) {
    Case c = product(Pattern::kReduceScatter, 2, 300, 210, 260, type, type);
    c.trans_b = CUBLAS_OP_T, c.is_random = true;
    c.epilog = Facts(type).is_complex ? 0 : CUBLASMP_MATMUL_EPILOGUE_GELU;
    World world(c);
    world.run(nullptr);
    const Matrix first = world.gather();
    for (int threads : {1, 2, 7}) {
      Threads pool(threads);
      for (int times = 0; times < 5; ++times) {
        world.run(&pool, /*on_threads=*/true);
        CHECK(world.gather().values == first.values);
      }
    }
  }
}

}  // namespace
}  // namespace jaxmp::test
