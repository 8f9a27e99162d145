// Without these an int8 kernel could misplace a row or a column at an edge, saturate where sums wrap around, or read
// beyond an operand.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "csrc/hostmp/kernels/int8_gemm.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {
namespace {

using hostmp::Int8Level;
using hostmp::Product;

struct Bytes {
  explicit Bytes(int64_t size) : data(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size)))) {}
  ~Bytes() { std::free(data); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  char* const data;
};

// The numbers are exactly as many as the operand has, so that a sanitizer sees what is read beyond it.
struct Stored {
  Stored(int64_t lines, int64_t length, int64_t ld, std::mt19937* random, bool is_least) : ld(ld) {
    numbers.resize(static_cast<size_t>((lines - 1) * ld + length));
    for (int8_t& number : numbers) number = is_least ? INT8_MIN : static_cast<int8_t>((*random)());
  }
  uint32_t At(int64_t line, int64_t i) const {
    return static_cast<uint32_t>(int32_t{numbers[static_cast<size_t>(line * ld + i)]});
  }
  int64_t ld;
  std::vector<int8_t> numbers;
};

struct Extents {
  int64_t m, n, k;
};

void check_product(Int8Level level, const Extents& x, int variant, std::mt19937* random) {
  const bool is_a_plain = variant & 1, is_b_plain = variant & 2, adds = variant & 4, is_least = variant == 15;
  const auto alpha = static_cast<int32_t>(variant & 8 ? (*random)() : 1);
  const int64_t gap = variant % 3;
  const Stored a =
      is_a_plain ? Stored(x.k, x.m, x.m + gap, random, is_least) : Stored(x.m, x.k, x.k + gap, random, is_least);
  const Stored b =
      is_b_plain ? Stored(x.n, x.k, x.k + gap, random, is_least) : Stored(x.k, x.n, x.n + gap, random, is_least);
  const int64_t ldc = x.m + gap;
  std::vector<uint32_t> c(static_cast<size_t>(ldc * x.n));
  for (uint32_t& number : c) number = static_cast<uint32_t>((*random)());
  std::vector<uint32_t> expected = c;
  for (int64_t col = 0; col < x.n; ++col) {
    for (int64_t row = 0; row < x.m; ++row) {
      uint32_t sum = 0;
      for (int64_t k = 0; k < x.k; ++k) {
        sum += (is_a_plain ? a.At(k, row) : a.At(row, k)) * (is_b_plain ? b.At(col, k) : b.At(k, col));
      }
      uint32_t& to = expected[static_cast<size_t>(col * ldc + row)];
      to = (adds ? to : 0) + static_cast<uint32_t>(alpha) * sum;
    }
  }
  const Bytes scratch(hostmp::Int8GemmScratch(level, x.m, x.n, x.k));
  const auto op = [](bool is_plain) { return is_plain ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T; };
  const Product product = {op(is_a_plain), op(is_b_plain),   x.m,  x.n,      x.k, a.numbers.data(),
                           a.ld,           b.numbers.data(), b.ld, c.data(), ldc};
  hostmp::Int8Gemm(level, product, alpha, adds, scratch.data);
  check::report(c == expected, __FILE__, __LINE__,
                "level " + std::to_string(static_cast<int>(level)) + ", m " + std::to_string(x.m) + ", n " +
                    std::to_string(x.n) + ", k " + std::to_string(x.k) + ", variant " + std::to_string(variant));
}

void check_level(Int8Level level, const char* name) {
  if (!Has(level)) return void(std::printf("skipped: this processor has no %s\n", name));
  std::mt19937 random(1);
  // Around the ends of words, vectors, register tiles, runs that are transposed together and blocks.
  std::vector<Extents> all = {{1, 1, 1}, {16, 4, 2}, {48, 8, 64}, {33, 31, 65}, {97, 67, 770}, {5, 3, 2050}};
  if (!check::kIsSlow) all.insert(all.end(), {{400, 9, 130}, {7, 530, 67}, {385, 9, 1537}, {9, 515, 800}});
  for (int i = 0; i < (check::kIsSlow ? 10 : 60); ++i) {
    const auto any = [&](unsigned most) { return 1 + static_cast<int64_t>(random() % most); };
    all.push_back({any(110), any(80), any(150)});
  }
  for (const Extents& extents : all) {
    for (int variant = 0; variant < 16; ++variant) check_product(level, extents, variant, &random);
  }
}

TEST(test_int8_kernels) {
  check_level(Int8Level::kPortable, "portable");
  check_level(Int8Level::kNeonDotprod, "neon_dotprod");
  check_level(Int8Level::kAvx2, "avx2");
  check_level(Int8Level::kAvx512Vnni, "avx512_vnni");
  check_level(Int8Level::kAmx, "amx");
}

}  // namespace
}  // namespace jaxmp::test
