// Our own bf16 kernels, each where this processor has its instructions, and the choice among them: against sums of
// small integers, which are exact in any order, with canaries around C and the scratch area.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using hostmp::KSegments;
using hostmp::Product;

struct Kernel {
  std::string name;
  bool is_available;
  void (*gemm)(const KSegments&, float, float, char*);
  int64_t kc, unit;  // of k
  int64_t (*scratch)(int64_t, int64_t, int64_t);
  hostmp::Bf16Sums sums;
  bool only_adds;  // beta is 0 or 1
};

uint16_t bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Stored numbers with what they stand for; rows of padding hold NaN, which no product may read.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, int64_t padding, std::mt19937* random)
      : ld(rows + padding), bits(static_cast<size_t>(ld * cols), bf16(std::numeric_limits<float>::quiet_NaN())) {
    values.resize(bits.size());
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t row = 0; row < rows; ++row) {
        const float value = static_cast<float>(static_cast<int>((*random)() % 17) - 8);
        values[static_cast<size_t>(col * ld + row)] = value;
        bits[static_cast<size_t>(col * ld + row)] = bf16(value);
      }
    }
  }
  float at(bool is_plain, int64_t row, int64_t col) const {
    return values[static_cast<size_t>(is_plain ? col * ld + row : row * ld + col)];
  }

  int64_t ld;
  std::vector<uint16_t> bits;
  std::vector<float> values;
};

// k from `begin` on, `k` of them.
Product part_of(const Product& p, int64_t begin, int64_t k) {
  Product part = p;
  part.k = k;
  part.a = static_cast<const uint16_t*>(p.a) + begin * (p.trans_a == abi::CUBLAS_OP_N ? p.lda : 1);
  part.b = static_cast<const uint16_t*>(p.b) + begin * (p.trans_b == abi::CUBLAS_OP_N ? 1 : p.ldb);
  return part;
}

// KSegments of one to seven units.
KSegments cut_up(const Kernel& kernel, const Product& p) {
  KSegments parts;
  for (int64_t at = 0; at < p.k; at += parts.back().k) {
    parts.push_back(part_of(p, at, std::min(p.k - at, kernel.unit * (1 + static_cast<int64_t>(parts.size()) * 3 % 7))));
  }
  return parts;
}

void test_product(const Kernel& kernel, bool is_a_plain, bool is_b_plain, int64_t m, int64_t n, int64_t k, float alpha,
                  float beta, bool is_cut, std::mt19937* random) {
  constexpr int64_t kPadding = 3;
  constexpr float kCanary = 12345.0f;
  const Matrix a(is_a_plain ? m : k, is_a_plain ? k : m, kPadding, random);
  const Matrix b(is_b_plain ? k : n, is_b_plain ? n : k, kPadding, random);
  const int64_t ldc = m + kPadding;
  std::vector<float> c(static_cast<size_t>(ldc * n), kCanary);
  std::vector<float> expected = c;
  for (int64_t col = 0; col < n; ++col) {
    for (int64_t row = 0; row < m; ++row) {
      const auto at = static_cast<size_t>(col * ldc + row);
      c[at] = beta == 0 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>((row + col) % 5);
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a.at(is_a_plain, row, l) * b.at(is_b_plain, l, col);
      expected[at] = alpha * sum + (beta == 0 ? 0 : beta * c[at]);
    }
  }
  const auto bytes = static_cast<size_t>(kernel.scratch(m, n, k));
  constexpr size_t kGuard = 64;
  std::vector<char> memory(bytes + 2 * kGuard + 64, 0x5a);
  char* const scratch = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + kGuard + 63) / 64 * 64);
  const std::string name = kernel.name + (is_a_plain ? " N" : " T") + (is_b_plain ? "N " : "T ") + std::to_string(m) +
                           "x" + std::to_string(n) + "x" + std::to_string(k) + " alpha " + std::to_string(alpha) +
                           " beta " + std::to_string(beta) + (is_cut ? " in parts" : "");
  const Product whole = {is_a_plain ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                         is_b_plain ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                         m,
                         n,
                         k,
                         a.bits.data(),
                         a.ld,
                         b.bits.data(),
                         b.ld,
                         c.data(),
                         ldc};
  kernel.gemm(is_cut ? cut_up(kernel, whole) : KSegments{whole}, alpha, beta, scratch);
  check::report(c == expected, __FILE__, __LINE__, name);
  check::report(scratch[-1] == 0x5a && scratch[bytes] == 0x5a, __FILE__, __LINE__, name + ": scratch overrun");
}

void test_kernel(const Kernel& kernel) {
  if (!kernel.is_available) {
    std::printf("SKIPPED: %s, which this processor does not have\n", kernel.name.c_str());
    return;
  }
  constexpr int64_t kExtents[][3] = {{1, 1, 1},    {1, 33, 2},    {16, 16, 32},   {17, 15, 31},   {32, 32, 64},
                                     {33, 31, 65}, {48, 8, 512},  {49, 9, 513},   {64, 96, 1024}, {31, 65, 1025},
                                     {5, 530, 40}, {70, 513, 33}, {96, 64, 2049}, {257, 33, 35},  {530, 3, 1030}};
  constexpr float kScales[][2] = {{1, 0}, {1, 1}, {2, 0}, {-1, 0.5f}, {1, -2}, {0, 1}};
  std::mt19937 random(1);
  for (bool is_a_plain : {true, false}) {
    for (bool is_b_plain : {true, false}) {
      for (const auto& extent : kExtents) {
        for (const auto& scale : kScales) {
          if (kernel.only_adds && scale[1] != 0 && scale[1] != 1) continue;
          for (bool is_cut : {false, true}) {
            test_product(kernel, is_a_plain, is_b_plain, extent[0], extent[1], extent[2], scale[0], scale[1], is_cut,
                         &random);
          }
        }
      }
    }
  }
}

// A number depends on its own row and column alone: the same operands, cut off at m rows and n columns, and with k in
// parts. It is the sum of the K blocks, each alone, in ascending order.
void test_extents_and_parts_do_not_matter(const Kernel& kernel) {
  if (!kernel.is_available) return;
  constexpr int64_t kM = 70, kN = 70, kK = 2500;
  std::mt19937 random(2);
  std::vector<uint16_t> a(kM * kK), b(kN * kK);
  std::uniform_real_distribution<float> draw(-1, 1);
  for (uint16_t& x : a) x = bf16(draw(random));
  for (uint16_t& x : b) x = bf16(draw(random));
  const auto run = [&](int64_t m, int64_t n, int64_t begin, int64_t end, bool is_cut) {
    std::vector<float> c(kM * kN);
    std::vector<char> memory(static_cast<size_t>(kernel.scratch(m, n, end - begin)) + 64);
    char* const scratch = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    const Product all = {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T, m, n, kK, a.data(), kM, b.data(), kN, c.data(), kM};
    const Product part = part_of(all, begin, end - begin);
    kernel.gemm(is_cut ? cut_up(kernel, part) : KSegments{part}, 1, 0, scratch);
    return c;
  };
  const std::vector<float> whole = run(kM, kN, 0, kK, false);
  check::report(run(kM, kN, 0, kK, true) == whole, __FILE__, __LINE__, kernel.name + " in parts");
  std::vector<float> total = run(kM, kN, 0, kernel.kc, false);
  for (int64_t at = kernel.kc; at < kK; at += kernel.kc) {
    const std::vector<float> sums = run(kM, kN, at, std::min(at + kernel.kc, kK), false);
    for (size_t i = 0; i < total.size(); ++i) total[i] += sums[i];
  }
  check::report(total == whole, __FILE__, __LINE__, kernel.name + " K block by K block");
  for (int64_t m = 1; m <= kM; ++m) {
    const int64_t n = kN + 1 - m;
    const std::vector<float> part = run(m, n, 0, kK, false);
    bool is_same = true;
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        const auto at = static_cast<size_t>(col * kM + row);
        is_same = is_same && part[at] == whole[at];
      }
    }
    check::report(is_same, __FILE__, __LINE__, kernel.name + " cut off at " + std::to_string(m) + " rows");
  }
}

// Few columns go to a kernel of their own, which writes out what the instruction does: also where products underflow,
// overflow and cancel, and k ends inside a block.
void test_few_columns_have_the_bits_of_many(const Kernel& kernel) {
  if (!kernel.is_available) return;
  constexpr int64_t kN = 33;
  std::mt19937 random(3);
  for (const uint32_t lowest : {30u, 56u, 120u, 180u}) {  // exponent; of a product of two: -194 to 107, all in all
    for (const int64_t k : {1, 2, 30, 31, 32, 33, 700, 2085}) {
      const auto m = static_cast<int64_t>(1 + random() % 90);
      const auto draw = [&] { return static_cast<uint16_t>((random() & 0x807f) | (lowest + random() % 14) << 7); };
      std::vector<uint16_t> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(kN * k));
      std::generate(a.begin(), a.end(), draw);
      std::generate(b.begin(), b.end(), draw);
      const auto run = [&](bool is_b_plain, int64_t n, float beta, bool is_cut) {
        std::vector<float> c(static_cast<size_t>(m * kN), 1.5f);
        std::vector<char> memory(static_cast<size_t>(kernel.scratch(m, n, k)) + 64);
        char* const scratch = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
        const Product whole = {abi::CUBLAS_OP_N,
                               is_b_plain ? abi::CUBLAS_OP_N : abi::CUBLAS_OP_T,
                               m,
                               n,
                               k,
                               a.data(),
                               m,
                               b.data(),
                               is_b_plain ? k : kN,
                               c.data(),
                               m};
        const KSegments parts = is_cut ? cut_up(kernel, whole) : KSegments{whole};
        n > hostmp::kBf16SmallN ? kernel.gemm(parts, 1, beta, scratch)
                                : hostmp::Bf16SmallNGemm(kernel.sums, parts, beta == 1);
        return c;
      };
      for (const bool is_b_plain : {true, false}) {
        for (const float beta : {0.0f, 1.0f}) {
          const std::vector<float> many = run(is_b_plain, kN, beta, false);
          for (int64_t n = 1; n <= 5; ++n) {
            const std::vector<float> few = run(is_b_plain, n, beta, n % 2 == 0);
            check::report(std::memcmp(few.data(), many.data(), static_cast<size_t>(4 * m * n)) == 0, __FILE__, __LINE__,
                          kernel.name + " " + std::to_string(n) + " columns, k = " + std::to_string(k) +
                              ", exponents from " + std::to_string(lowest));
          }
        }
      }
    }
  }
}

// k may be cut anywhere: of what is cut here, some ends where an instruction's k do.
hostmp::KernelChoice choice_of(abi::cublasOperation_t trans_a, int64_t n, float alpha) {
  return hostmp::KernelOf({abi::CUDA_R_16BF, abi::CUDA_R_16BF, trans_a, n,
                           /*is_fixed_order=*/false, alpha == 1});
}
const Kernel kChosen = {"the chosen kernel",
                        true,
                        [](const KSegments& parts, float alpha, float beta, char* scratch) {
                          const Product& p = parts.front();
                          hostmp::Multiply(choice_of(p.trans_a, p.n, alpha), parts, alpha, beta == 1, scratch);
                        },
                        0,
                        8,
                        [](int64_t m, int64_t n, int64_t k) {
                          return std::max(hostmp::ScratchBytes(choice_of(abi::CUBLAS_OP_N, n, 1), m, n, k),
                                          hostmp::ScratchBytes(choice_of(abi::CUBLAS_OP_T, n, 1), m, n, k));
                        },
                        hostmp::Bf16Sums::kAmx,
                        /*only_adds=*/true};

TEST(test_kernels) {
  const Kernel kernels[] = {
      {"AVX512_BF16", hostmp::cpu().avx512_bf16, hostmp::Avx512Bf16Gemm, hostmp::kKC, hostmp::kBf16Unit,
       hostmp::Avx512Bf16GemmScratch, hostmp::Bf16Sums::kAvx512Bf16, false},
      {"AMX", hostmp::cpu().amx_bf16, hostmp::AmxGemm, hostmp::kAmxKC, hostmp::kAmxUnit, hostmp::AmxGemmScratch,
       hostmp::Bf16Sums::kAmx, false},
  };
  for (const Kernel& kernel : kernels) {
    test_kernel(kernel);
    test_extents_and_parts_do_not_matter(kernel);
    test_few_columns_have_the_bits_of_many(kernel);
  }
  test_kernel(kChosen);
}

}  // namespace
}  // namespace jaxmp::test
