// Without these an epilog could be applied to a partial sum, with another row's bias, or leave a part of its aux
// unwritten; and rounding could creep into sums. Random operands, judged component by component:
// |D - D*| <= c (u_acc (|alpha| |A||B| + |beta C| + |bias|) + u_out |D*|), D* in double.
#include <cmath>
#include <numeric>

#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/definitions.h"
#include "tests/cpp/hostmp_world.h"
#include "tests/cpp/instruction_set.h"

namespace jaxmp::test {
namespace {

// What is allowed, in units of the bound: sums of some hundred terms, in an order that the BLAS chooses.
constexpr double kAllowed = 8;
double worst_used = 0;

void fill_random(Matrix* matrix, cudaDataType_t type, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::array<char, 16> bytes;
  for (Number& value : matrix->values) {
    const double real = normal(random);
    encode(type, {real, Facts(type).is_complex ? normal(random) : 0}, bytes.data());
    value = decode(type, bytes.data());  // as the operand holds it
  }
}

// How much of the allowance an error takes; the judge of this file, judged itself below.
double used(const Case& c, Number got, Number expected, double magnitude) {
  const double u_acc = unit_roundoff(hostmp::AccumulatorOf(c.in)), u_out = unit_roundoff(c.out);
  const double allowed = kAllowed * (u_acc * magnitude + u_out * std::abs(expected)) + 1e-37;
  const double error = std::abs(got - expected);
  return error <= allowed ? error / allowed : INFINITY;  // so too for a NaN
}

// The aux that belongs to D's element (i, j) on `rank`, as a number, or as 0 and 1.
Number aux_at(const World& world, int64_t rank, int64_t i, int64_t j) {
  const Rank& r = world.ranks[static_cast<size_t>(rank)];
  const int64_t row = world.layouts.d.local_row(i), col = world.layouts.d.local_col(j);
  const char* const data = r.aux->get();
  if (is_relu(world.c.epilog)) return (data[col * r.aux_ld / 8 + row / 8] >> (row % 8)) & 1;
  return decode(world.c.out, data + (col * r.aux_ld + row) * Facts(world.c.out).bytes);
}

void check_padding(const World& world) {
  for (int rank = 0; rank < world.c.nranks(); ++rank) {
    const Rank& r = world.ranks[static_cast<size_t>(rank)];
    const auto [rows, cols] = world.layouts.d.local_shape(rank);
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t row = rows; row < r.aux_ld; ++row) {
        const bool is_zero =
            is_relu(world.c.epilog)
                ? ((r.aux->get()[col * r.aux_ld / 8 + row / 8] >> (row % 8)) & 1) == 0
                : decode(world.c.out, r.aux->get() + (col * r.aux_ld + row) * Facts(world.c.out).bytes) == 0.0;
        if (!is_zero) return check::report(false, __FILE__, __LINE__, world.c.name() + ": padding of the aux");
      }
    }
  }
}

void check_values(const World& world) {
  const Case& c = world.c;
  Matrix product, magnitude;
  multiply(world, &product, &magnitude);
  double worst = 0;
  bool aux_is_right = true;
  for (int64_t copy = 0; copy < (c.pattern == Pattern::kAllReduce ? c.nranks() : 1); ++copy) {
    const Matrix d = world.gather(copy);
    for (int64_t j = 0; j < c.n; ++j) {
      for (int64_t i = 0; i < c.m; ++i) {
        Number z = c.alpha * product.at(i, j);
        double size = std::abs(c.alpha) * magnitude.at(i, j).real();
        if (c.has_c) z += c.beta * world.c0.at(i, j);
        if (c.has_c) size += std::abs(c.beta * world.c0.at(i, j));
        if (has_bias(c.epilog)) z += world.bias[static_cast<size_t>(i)];
        if (has_bias(c.epilog)) size += std::abs(world.bias[static_cast<size_t>(i)]);
        if (is_derivative(c.epilog)) {
          // The slope is computed to a few roundings of its terms, of which the largest is about 1.
          const double by = slope(c.epilog, world.aux0.at(i, j).real());
          worst = std::max(worst, used(c, d.at(i, j), z * by, size * (std::abs(by) + !is_relu(c.epilog))));
          continue;
        }
        worst = std::max(worst, used(c, d.at(i, j), activation(c.epilog, z), size));
        if (!has_aux(c.epilog)) continue;
        const int64_t col = c.pattern == Pattern::kAllReduce ? copy * c.n + j : j;
        const Number aux = aux_at(world, world.layouts.d.owner(i, col), i, col);
        // The mask says what D says: z > 0 as it was computed.
        if (is_relu(c.epilog)) aux_is_right = aux_is_right && (aux == 1.0) == (d.at(i, j).real() > 0);
        if (!is_relu(c.epilog)) worst = std::max(worst, used(c, aux, z, size));
      }
    }
  }
  worst_used = std::max(worst_used, worst);
  check::report(worst <= 1, __FILE__, __LINE__, c.name() + ": used " + std::to_string(100 * worst) + " %");
  check::report(aux_is_right, __FILE__, __LINE__, c.name() + ": aux");
}

// The bias gradient on every rank, from D as it was stored, or from op(A) and op(B).
void check_gradient(const World& world) {
  const Case& c = world.c;
  const bool is_of_b = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB,
             is_of_a = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADA;
  const Matrix d = world.gather();
  const Matrix& x = is_of_b ? world.b : is_of_a ? world.a : d;
  double worst = 0;
  for (int64_t i = 0; i < (is_of_b ? c.n : c.m); ++i) {
    Number sum = 0;
    double size = 0;
    for (int64_t j = 0; j < x.cols; ++j) {
      sum += x.at(i, j);
      size += std::abs(x.at(i, j));
    }
    for (int rank = 0; rank < c.nranks(); ++rank) {
      bool holds_row = is_of_b;
      for (int64_t j = 0; j < world.layouts.d.cols && !holds_row; ++j) holds_row = world.layouts.d.owner(i, j) == rank;
      if (!holds_row) continue;
      const int64_t at = is_of_b ? i : world.layouts.d.local_row(i);
      const char* const data = world.ranks[static_cast<size_t>(rank)].gradient->get();
      worst = std::max(worst, used(c, decode(c.out, data + at * Facts(c.out).bytes), sum, size));
    }
  }
  worst_used = std::max(worst_used, worst);
  check::report(worst <= 1, __FILE__, __LINE__, c.name() + ": gradient used " + std::to_string(100 * worst) + " %");
}

class RandomWorld : public World {
 public:
  explicit RandomWorld(const Case& c)
      : World(c, [](World* world) {
          fill_random(&world->a, world->c.in, 1);
          fill_random(&world->b, world->c.in, 2);
          fill_random(&world->c0, world->c.out, 3);
          fill_random(&world->aux0, world->c.out, 4);
        }) {}
};

void check_case(const Case& c, hostmp::Pool* pool) {
  RandomWorld world(c);
  world.run(pool);
  for (const std::string& error : world.errors)
    check::report(error.empty(), __FILE__, __LINE__, c.name() + ": " + error);
  check_values(world);
  world.check_untouched();
  if (has_aux(c.epilog) && !is_derivative(c.epilog)) check_padding(world);
  if (has_gradient(c.epilog)) check_gradient(world);
}

constexpr int kEpilogs[] = {0, 4, 2, 6, 32, 36, 130, 134, 160, 164, 136, 152, 192, 208, 256, 512};

// The transposition of B that the epilog takes.
cublasOperation_t op_b(int epilog) { return epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB ? CUBLAS_OP_T : CUBLAS_OP_N; }

void test_epilogs(hostmp::Pool* pool) {
  const Case patterns[] = {{Pattern::kLocal, 1, 1},     {Pattern::kAllGather, 3, 1}, {Pattern::kReduceScatter, 2, 1},
                           {Pattern::kAllReduce, 2, 1}, {Pattern::kGrid, 2, 2},      {Pattern::kGrid, 1, 3}};
  const std::pair<cudaDataType_t, cudaDataType_t> types[] = {{CUDA_R_32F, CUDA_R_32F},
                                                             {CUDA_R_64F, CUDA_R_64F},
                                                             {CUDA_R_16BF, CUDA_R_16BF},
                                                             {CUDA_R_16BF, CUDA_R_32F},
                                                             {CUDA_R_16F, CUDA_R_16F}};
  for (Case c : patterns) {
    for (const auto& [in, out] : types) {
      for (int epilog : kEpilogs) {
        c.in = in, c.out = out, c.epilog = epilog, c.trans_b = op_b(epilog);
        c.m = 45, c.n = 42, c.k = 100;
        check_case(c, pool);
        c.m = 1, c.n = 6, c.k = 0;  // the epilog of a zero
        check_case(c, pool);
      }
    }
  }
}

// A stored transposed, its columns are cut by another number of processes than D's rows: tiles of D then begin within a
// byte of its mask, and share that byte with their neighbours.
void test_masks_that_are_cut_anywhere(hostmp::Pool* pool) {
  const std::pair<int, int> grids[] = {{1, 2}, {2, 1}, {1, 4}, {7, 1}, {1, 7}, {3, 2}, {2, 3}, {2, 2}};
  const int64_t sizes[] = {1, 3, 11, 130};
  for (const auto& [p, q] : grids) {
    for (int64_t size : sizes) {
      for (int epilog : {130, 134, 136, 152, 160, 164, 192, 208}) {
        for (int transposed = 0; transposed < 4; ++transposed) {
          const int64_t unit = std::lcm(p, q);
          Case c = {Pattern::kGrid, p, q, size * unit, 3 * unit, 2 * unit};
          c.trans_a = transposed & 1 ? CUBLAS_OP_T : CUBLAS_OP_N;
          c.trans_b = transposed & 2 ? CUBLAS_OP_T : CUBLAS_OP_N;
          c.epilog = epilog, c.has_c = size == 3, c.beta = c.has_c ? 0.5 : 0;
          check_case(c, pool);
        }
      }
      if (check::kUnderThreadSanitizer) break;
    }
  }
}

// Two threads write bits of one byte at once, thousands of times: none may undo the other's.
void test_tiles_that_share_a_byte_of_the_mask(hostmp::Pool* pool) {
  Case c = {Pattern::kGrid, 1, 7, 63, 4200, 14};
  c.trans_a = CUBLAS_OP_T, c.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU_AUX;
  for (int times = check::kIsSlow ? 1 : 5; times > 0; --times) check_case(c, pool);
}

// Several tiles in both directions, so that a tile's bias and aux are not those of the first.
void test_tiles(hostmp::Pool* pool) {
  for (int epilog : kEpilogs) {
    if (check::kIsSlow && epilog != 134 && epilog != 164) continue;
    Case c = {Pattern::kAllReduce, 2, 1, 700, 130, 520};
    c.epilog = epilog, c.has_c = true, c.alpha = 0.5, c.beta = -0.75, c.trans_b = op_b(epilog);
    check_case(c, pool);
    c.in = c.out = CUDA_R_16BF;
    check_case(c, pool);
  }
}

// A sum of random numbers has the same bits however the matrix is distributed, and whoever helps.
void test_gradient_bits(hostmp::Pool* pool) {
  for (const int epilog : {CUBLASMP_MATMUL_EPILOGUE_BGRADA, CUBLASMP_MATMUL_EPILOGUE_BGRADB}) {
    std::vector<std::vector<Number>> sums;
    const Case layouts[] = {{Pattern::kLocal, 1, 1},     {Pattern::kAllGather, 3, 1}, {Pattern::kReduceScatter, 2, 1},
                            {Pattern::kAllReduce, 2, 1}, {Pattern::kGrid, 2, 2},      {Pattern::kGrid, 1, 3}};
    for (Case c : layouts) {
      c.m = 90, c.n = 66, c.k = 600, c.epilog = epilog, c.trans_b = op_b(epilog);
      RandomWorld world(c);
      world.run(sums.size() % 2 ? pool : nullptr);
      const bool is_of_b = epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
      std::vector<Number>& sum = sums.emplace_back();
      for (int64_t i = 0; i < (is_of_b ? c.n : c.m); ++i) {
        const int64_t rank = is_of_b ? 0 : world.layouts.d.owner(i, 0);
        const int64_t at = is_of_b ? i : world.layouts.d.local_row(i);
        sum.push_back(decode(c.out, world.ranks[static_cast<size_t>(rank)].gradient->get() + at * 4));
      }
      CHECK(sum == sums[0]);
    }
  }
}

// Sums of D are those of its chunks of 64 columns, added in order, whoever summed which of them.
void test_gradient_of_d_bits(hostmp::Pool* pool) {
  const Case layouts[] = {{Pattern::kLocal, 1, 1},
                          {Pattern::kAllGather, 3, 1},
                          {Pattern::kReduceScatter, 2, 1},
                          {Pattern::kAllReduce, 2, 1},
                          {Pattern::kGrid, 2, 2}};
  for (Case c : layouts) {
    c.m = 530, c.n = 1100, c.k = 64, c.epilog = CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD;
    RandomWorld world(c);
    world.run(pool);
    const Matrix d = world.gather();
    bool is_equal = true;
    for (int64_t i = 0; i < c.m; ++i) {
      float sum = 0;
      for (int64_t begin = 0; begin < c.n; begin += 64) {
        float block = 0;
        for (int64_t j = begin; j < std::min(begin + 64, c.n); ++j) block += static_cast<float>(d.at(i, j).real());
        sum += block;
      }
      const Rank& rank = world.ranks[static_cast<size_t>(world.layouts.d.owner(i, 0))];
      is_equal = is_equal && decode(c.out, rank.gradient->get() + 4 * world.layouts.d.local_row(i)) == Number(sum);
    }
    check::report(is_equal, __FILE__, __LINE__, c.name());
  }
}

void test_complex(hostmp::Pool* pool) {
  for (cudaDataType_t type : {CUDA_C_32F, CUDA_C_64F}) {
    Case c = {Pattern::kReduceScatter, 2, 1, 40, 30, 60, CUBLAS_OP_C, CUBLAS_OP_N, type, type};
    c.has_c = true, c.alpha = {0.5, -2}, c.beta = {1, 0.25}, c.epilog = 4;
    check_case(c, pool);
  }
}

// 16-bit operands are summed in f32 over all of k and all ranks, and rounded once: 1 + 2^-9 + ... would be lost at
// every partial sum in bf16.
void test_rounds_once() {
  Case c = {Pattern::kReduceScatter, 4, 1, 1, 4, 512, CUBLAS_OP_N, CUBLAS_OP_N, CUDA_R_16BF, CUDA_R_16BF};
  World world(c, [](World* w) {
    for (Number& value : w->a.values) value = 1;
    for (Number& value : w->b.values) value = 0.00390625;  // 2^-8
    for (int64_t j = 0; j < w->b.cols; ++j) w->b.at(0, j) = 256;
  });
  world.run(nullptr);
  const Matrix d = world.gather();
  for (const Number& value : d.values) CHECK_EQ(value.real(), 258.0);  // 256 + 511/256, to 8 bits
}

void test_judge() {
  const Case c;
  CHECK(used(c, 1 + 1e-5, 1, 1) > 1);
  CHECK(used(c, NAN, 1, 1) > 1);
  CHECK(used(c, 1 + 1e-7, 1, 1) < 1);
}

}  // namespace
}  // namespace jaxmp::test

int main() {
  using namespace jaxmp;  // NOLINT
  tests::LimitInstructionSet();
  CHECK_EQ(hostmp::LoadBlas(check::environment("JAXMP_BLAS")).message(), "");
  test::Threads pool(2);
  test::test_judge();
  test::test_epilogs(&pool);
  test::test_tiles(&pool);
  test::test_masks_that_are_cut_anywhere(&pool);
  test::test_tiles_that_share_a_byte_of_the_mask(&pool);
  test::test_gradient_bits(&pool);
  test::test_gradient_of_d_bits(&pool);
  test::test_complex(&pool);
  test::test_rounds_once();
  std::printf("hostmp_epilog: worst error %.0f %% of what is allowed\n", 100 * test::worst_used);
  return check::summary("hostmp_epilog");
}
