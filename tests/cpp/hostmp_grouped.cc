// Products of groups of rows; the ranks have rows of all groups. Rows that go to the matrix of another rank, sums
// that miss a rank, and bits that tell the ranks apart would be silently wrong.
#include <limits>
#include <random>

#include "csrc/hostmp/handles/grouped.h"
#include "tests/cpp/check.h"
#include "tests/cpp/placement.h"
#include "tests/cpp/threads.h"

namespace jaxmp::hostmp {
namespace {

TEST(LoadsTheBlas) {
  check::load_blas();
  check::limit_instruction_set();
}

struct Shape {
  bool is_contraction = false, is_transposed = false, is_fixed_order = false;
  abi::cudaDataType_t type = abi::CUDA_R_32F, out = abi::CUDA_R_32F;
  int64_t matrices = 2, m = 24, k = 5, n = 7, batch = 1;
  abi::cudaDataType_t narrow = abi::CUDA_R_32F;  // of w, if it is narrower than the rows
  abi::cudaDataType_t type_w() const { return Facts(narrow).is_low_precision && !is_contraction ? narrow : type; }
};

// Numbers as an array of f32 or bf16 holds them.
class Array {
 public:
  Array(abi::cudaDataType_t type, const std::vector<float>& values)
      : type_(type), bytes_(values.size() * static_cast<size_t>(Facts(type).bytes)) {
    for (size_t i = 0; i < values.size(); ++i) {
      test::encode_at(type, values[i], bytes_.data(), static_cast<int64_t>(i));
    }
  }
  void* data() { return bytes_.data(); }
  std::vector<float> values() const {
    std::vector<float> values;
    for (size_t at = 0; at < bytes_.size(); at += static_cast<size_t>(Facts(type_).bytes)) {
      values.push_back(static_cast<float>(test::decode(type_, &bytes_[at]).real()));
    }
    return values;
  }

 private:
  abi::cudaDataType_t type_;
  std::vector<char> bytes_;
};

// Bounds of all groups, in the rows of a rank.
using Bounds = std::vector<int32_t>;

// One product; each rank has its own bounds. D starts as NaN: an unwritten element differs from every answer.
struct World {
  World(const Shape& shape, std::vector<Bounds> given) : shape(shape), bounds(std::move(given)) {
    const int64_t of_w = shape.is_contraction ? shape.m * shape.n : shape.matrices * shape.k * shape.n;
    const int64_t of_d = shape.is_contraction ? shape.matrices * shape.k * shape.n : shape.m * shape.n;
    std::mt19937 random(1);
    std::uniform_int_distribution<int> digit(-2, 2);
    const auto drawn = [&](int64_t size) {
      std::vector<float> values(static_cast<size_t>(shape.batch * size));
      for (float& value : values) value = static_cast<float>(digit(random));
      return values;
    };
    for (size_t rank = 0; rank < bounds.size(); ++rank) {
      x.emplace_back(shape.type, drawn(shape.m * shape.k));
      w.emplace_back(shape.type_w(), drawn(of_w));
      d.emplace_back(shape.out, std::vector<float>(static_cast<size_t>(shape.batch * of_d),
                                                   std::numeric_limits<float>::quiet_NaN()));
    }
  }

  int64_t groups() const { return shape.matrices * static_cast<int64_t>(bounds.size()); }

  GroupedProduct Of(size_t rank) {
    GroupedProduct p{};
    p.is_contraction = shape.is_contraction, p.is_transposed = shape.is_transposed;
    p.is_fixed_order = shape.is_fixed_order;
    p.type = shape.type, p.type_w = shape.type_w(), p.out = shape.out;
    p.batch = shape.batch, p.matrices = shape.matrices, p.m = shape.m, p.k = shape.k, p.n = shape.n;
    p.has_x_batch = p.has_w_batch = shape.batch > 1;
    p.x = x[rank].data(), p.w = w[rank].data(), p.bounds = bounds[rank].data(), p.d = d[rank].data();
    return p;
  }

  // Each rank's call on this thread, in an order of its own, or each on a thread of its own.
  void Run(Pool* pool, bool on_threads = false) {
    test::Streams streams(bounds.size());
    const auto start = [&](size_t rank) {
      Stream* const stream = streams.start(rank, &rendezvous, pool);
      const int number = static_cast<int>(rank), nranks = static_cast<int>(bounds.size());
      if (const Status status = MultiplyGroups(Of(rank), *stream, number, nranks); !status.ok()) {
        Fail(*stream, number, nranks, status);
      }
    };
    std::vector<std::thread> threads;
    for (size_t i = bounds.size(); i-- > 0;) on_threads ? threads.emplace_back(start, i), void() : start(i);
    for (std::thread& thread : threads) thread.join();
    streams.wait();
    errors = streams.errors;
  }

  // The group of a row of a rank; -1 if it has none.
  int64_t GroupOf(size_t rank, int64_t row) const {
    int64_t first = 0;
    for (int64_t group = 0; group < groups(); ++group) {
      const auto at = static_cast<size_t>(group);
      const int64_t begin = std::clamp<int64_t>(bounds[rank][at], first, shape.m);
      const int64_t end = std::clamp<int64_t>(bounds[rank][at + 1], begin, shape.m);
      if (row >= begin && row < end) return group;
      first = end;
    }
    return -1;
  }

  // D by a loop over the rows of all ranks.
  std::vector<std::vector<float>> Expected() const {
    std::vector<std::vector<float>> found, xs, ws;
    for (size_t rank = 0; rank < bounds.size(); ++rank) {
      found.emplace_back(d[rank].values().size(), 0.0f);
      xs.push_back(x[rank].values()), ws.push_back(w[rank].values());
    }
    const int64_t m = shape.m, k = shape.k, n = shape.n;
    for (int64_t row = 0; row < shape.batch * m; ++row) {
      for (size_t rank = 0; rank < bounds.size(); ++rank) {
        const int64_t group = GroupOf(rank, row % m), index = row / m;
        if (group < 0) continue;
        const auto owner = static_cast<size_t>(group / shape.matrices);
        const int64_t matrix = (index * shape.matrices + group % shape.matrices) * k * n;
        for (int64_t i = 0; i < k; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            const float left = xs[rank][static_cast<size_t>(row * k + i)];
            const auto at = static_cast<size_t>(matrix + (shape.is_transposed ? j * k + i : i * n + j));
            const auto to = static_cast<size_t>(row * n + j);
            shape.is_contraction ? found[owner][at] += left * ws[rank][to] : found[rank][to] += left * ws[owner][at];
          }
        }
      }
    }
    return found;
  }

  bool IsRight() const {
    const auto expected = Expected();
    for (size_t rank = 0; rank < bounds.size(); ++rank) {
      if (!errors[rank].empty() || d[rank].values() != expected[rank]) return false;
    }
    return true;
  }

  const Shape shape;
  std::vector<Bounds> bounds;
  std::vector<Array> x, w, d;  // by rank
  std::vector<std::string> errors;
  Rendezvous rendezvous;
};

// Groups of rows that are adjacent over all ranks, as in a global array.
std::vector<Bounds> Global(int64_t nranks, int64_t m, const std::vector<int32_t>& sizes) {
  Bounds all = {0};
  for (const int32_t size : sizes) all.push_back(all.back() + size);
  std::vector<Bounds> bounds;
  for (int64_t rank = 0; rank < nranks; ++rank) {
    bounds.push_back(all);
    for (int32_t& bound : bounds.back()) bound -= static_cast<int32_t>(rank * m);
  }
  return bounds;
}

// Bounds at random: each rank has a few rows of every group, some bounds decrease, and some are outside of the rows.
std::vector<Bounds> Drawn(int64_t nranks, int64_t m, int64_t groups, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> row(-3, static_cast<int32_t>(m) + 3);
  std::vector<Bounds> bounds;
  for (int64_t rank = 0; rank < nranks; ++rank) {
    Bounds& mine = bounds.emplace_back(static_cast<size_t>(groups) + 1);
    for (int32_t& bound : mine) bound = row(random);
    std::sort(mine.begin(), mine.end());
    if (seed % 3 == 0) std::swap(mine.front(), mine.back());
  }
  return bounds;
}

std::vector<Shape> Modes(const Shape& base) {
  std::vector<Shape> shapes(3, base);
  shapes[1].is_transposed = true;
  shapes[2].is_contraction = true;
  return shapes;
}

void CheckAll(const Shape& base, const std::vector<Bounds>& bounds, Pool* pool) {
  for (Shape shape : Modes(base)) {
    for (const bool is_fixed_order : {false, true}) {
      for (const bool is_bf16 : {false, true}) {
        shape.is_fixed_order = is_fixed_order;
        shape.type = is_bf16 ? abi::CUDA_R_16BF : abi::CUDA_R_32F;
        World world(shape, bounds);
        world.Run(pool, /*on_threads=*/is_bf16);
        CHECK(world.IsRight());
      }
    }
  }
}

TEST(RowsGoToTheMatricesOfOtherRanks) {
  test::Threads pool(3);
  for (const int64_t nranks : {1, 2, 3, 4}) {
    Shape shape;
    const auto groups = static_cast<size_t>(shape.matrices * nranks);
    const auto all = static_cast<int32_t>(shape.m * nranks);
    std::vector<int32_t> even(groups, all / static_cast<int32_t>(groups)), one(groups, 0), none(groups, 0),
        uneven(groups, 1);
    one[groups / 2] = all;
    uneven[0] = all / 2, uneven[groups - 1] = 0;
    for (const std::vector<int32_t>& sizes : {even, one, none, uneven})
      CheckAll(shape, Global(nranks, shape.m, sizes), &pool);
    shape.batch = 2;
    CheckAll(shape, Global(nranks, shape.m, uneven), nullptr);
  }
}

TEST(EachRankHasBoundsOfItsOwn) {
  test::Threads pool(3);
  for (uint32_t seed = 0; seed < (check::kIsSlow ? 3 : 12); ++seed) {
    Shape shape;
    const int64_t nranks = 1 + seed % 4;
    shape.m = seed % 2 ? 40 : 331, shape.k = 35, shape.n = 50;  // small groups are put together, large ones are not
    CheckAll(shape, Drawn(nranks, shape.m, shape.matrices * nranks, seed), &pool);
  }
}

TEST(ANarrowMatrixIsDecoded) {
  test::Threads pool(3);
  for (const auto narrow : {abi::CUDA_R_8I, abi::CUDA_R_8F_E4M3}) {
    for (const int64_t m : {40, 331}) {
      Shape shape;
      shape.m = m, shape.k = 35, shape.n = 50, shape.narrow = narrow;
      for (const int64_t nranks : {1, 3}) CheckAll(shape, Drawn(nranks, m, shape.matrices * nranks, 1), &pool);
    }
  }
}

// More tiles than one for each group, which threads share.
TEST(LargeGroupsAreCut) {
  test::Threads pool(3);
  Shape shape;
  shape.m = 200, shape.k = 130, shape.n = 170;
  CheckAll(shape, Global(2, shape.m, {20, 340, 0, 30}), &pool);
}

TEST(ExtentsOfZero) {
  for (const int64_t extent : {0, 1, 2, 3}) {
    Shape shape;
    (extent == 0 ? shape.m : extent == 1 ? shape.k : extent == 2 ? shape.n : shape.matrices) = 0;
    const std::vector<int32_t> sizes(static_cast<size_t>(2 * shape.matrices), static_cast<int32_t>(shape.m / 3));
    CheckAll(shape, Global(2, shape.m, sizes), nullptr);
  }
}

TEST(ResultsAreRounded) {
  for (Shape shape : Modes(Shape{})) {
    shape.type = shape.out = abi::CUDA_R_16BF;
    World world(shape, Global(2, shape.m, {10, 3, 20, 6}));
    world.Run(nullptr);
    CHECK(world.IsRight());
  }
}

// In one order, a row has the bits of the row and its matrix, and a sum the bits of its rows, on any ranks.
TEST(OrderedBitsDoNotKnowTheRanks) {
  test::Threads pool(3);
  constexpr int64_t kRows = 1440, kGroups = 4;
  const std::vector<int32_t> sizes = {701, 0, 37, 690};
  for (Shape shape : Modes(Shape{})) {
    for (const auto type : {abi::CUDA_R_32F, abi::CUDA_R_16BF}) {
      shape.is_fixed_order = true, shape.type = type, shape.k = 600, shape.n = 24;
      std::vector<float> first;
      for (const int64_t nranks : {1, 2, 4}) {
        shape.m = kRows / nranks, shape.matrices = kGroups / nranks;
        World world(shape, Global(nranks, shape.m, sizes));
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        for (auto* arrays : {&world.x, &world.w}) {  // one after the other, ranks have the same global array
          for (Array& array : *arrays) {
            std::vector<float> values = array.values();
            const int64_t size = arrays == &world.x     ? shape.m * shape.k
                                 : shape.is_contraction ? shape.m * shape.n
                                                        : shape.matrices * shape.k * shape.n;
            for (int64_t i = 0; i < size; ++i) values[static_cast<size_t>(i)] = normal(random);
            array = Array(type, values);
          }
        }
        world.Run(&pool);
        std::vector<float> all;
        for (const Array& array : world.d) {
          const std::vector<float> part = array.values();
          all.insert(all.end(), part.begin(), part.end());
        }
        if (nranks == 1) first = all;
        CHECK(all == first);
      }
    }
  }
}

// 0 times an infinite weight is NaN.
TEST(WeightsOfAGroupWithoutRowsReachNothing) {
  Shape shape;
  World world(shape, Global(2, shape.m, {10, 0, 20, 18}));
  std::vector<float> values = world.w[0].values();
  std::fill(values.begin() + shape.k * shape.n, values.end(), std::numeric_limits<float>::infinity());
  world.w[0] = Array(shape.type, values);
  world.Run(nullptr);
  for (const Array& d : world.d) {
    for (const float value : d.values()) CHECK(value - value == 0);
  }
}

TEST(EveryRankHearsOfAnError) {
  World world(Shape{}, Global(2, 24, {10, 3, 20, 6}));
  std::vector<GroupedProduct> products = {world.Of(0), world.Of(1)};
  products[1].k = 4;
  test::Streams streams(2);
  for (const int rank : {0, 1}) {
    const auto r = static_cast<size_t>(rank);
    CHECK(MultiplyGroups(products[r], *streams.start(r, &world.rendezvous), rank, 2).ok());
  }
  streams.wait();
  for (const std::string& error : streams.errors) CHECK_CONTAINS(error, "disagree");
  products[0].out = abi::CUDA_R_64F;
  CHECK_CONTAINS(MultiplyGroups(products[0], *streams.start(0, &world.rendezvous), 0, 2).message(), "no result of");
}

}  // namespace
}  // namespace jaxmp::hostmp
