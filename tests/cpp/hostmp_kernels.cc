// Our own kernels, if this processor has their instructions. Kernels that sum in one order have the bits of the plain
// loops that their header describes; bf16's and int8's are exact. Without these a kernel could misplace a row or a
// column at an edge, read beyond an operand, or write beyond C or its scratch area; and bits could depend on the
// extents, or on where k is cut.

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/int8_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "tests/cpp/kernel_case.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using Extents = std::vector<std::array<int64_t, 3>>;

template <typename T>
struct Kernel {
  using Real = typename Type<T>::Real;
  std::string name;
  bool is_available;
  std::function<void(const KSegments&, Real alpha, Real beta, char* scratch)> multiply;
  std::function<int64_t(int64_t m, int64_t n, int64_t k)> scratch;
  Draw draw;
  Extents extents;
  std::vector<std::pair<Real, Real>> scales;  // alpha and beta
  int64_t unit;                               // of k, which may be cut at its multiples; 0: nowhere
  int ops = 2;                                // N, T and C
  bool is_fused = true;
  int64_t most_columns = INT64_MAX;  // of a plain A, if there is a limit
};

// Memory of exactly the size that was asked for, aligned, between two guards.
struct Scratch {
  explicit Scratch(int64_t bytes) : bytes(static_cast<size_t>(bytes)), memory(this->bytes + 192, 0x5a) {}
  char* data() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) / 64 * 64); }
  bool is_intact() { return data()[-1] == 0x5a && data()[bytes] == 0x5a; }
  size_t bytes;
  std::vector<char> memory;
};

// Where k is cut: inside K blocks, between them, and in pieces of one; or in pieces of one to seven units.
std::vector<int64_t> cuts_of(int64_t k, int64_t unit) {
  std::vector<int64_t> cuts;
  if (unit == 1) {
    for (int64_t cut : {1, 2, 3, 100, 250, 256, 257, 300, 511, 513}) {
      if (cut < k) cuts.push_back(cut);
    }
  } else {
    for (int64_t cut = unit, i = 1; cut < k; cut += unit * (1 + i++ * 3 % 7)) cuts.push_back(cut);
  }
  cuts.push_back(k);
  return cuts;
}

template <typename T>
void check_kernel(const Kernel<T>& kernel) {
  if (!kernel.is_available) return void(std::printf("SKIPPED: %s is not of this processor\n", kernel.name.c_str()));
  unsigned seed = 0;
  for (int ops = 0; ops < kernel.ops * kernel.ops; ++ops) {
    const auto trans_a = static_cast<abi::cublasOperation_t>(ops / kernel.ops);
    const auto trans_b = static_cast<abi::cublasOperation_t>(ops % kernel.ops);
    for (const auto& [m, n, k] : kernel.extents) {
      if (kernel.most_columns < INT64_MAX && (n > kernel.most_columns || trans_a != abi::CUBLAS_OP_N)) continue;
      const Case<T> test(trans_a, trans_b, m, n, k, kernel.draw, ++seed);
      for (const auto& [alpha, beta] : kernel.scales) {
        const auto expected = test.expected(alpha, beta, kernel.is_fused);
        for (int is_cut = 0; is_cut <= (kernel.unit > 0); ++is_cut) {
          auto c = test.given(beta);
          Scratch scratch(kernel.scratch(m, n, k));
          const std::vector<int64_t> cuts = is_cut ? cuts_of(k, kernel.unit) : std::vector<int64_t>{k};
          kernel.multiply(test.parts(0, cuts, c.data()), alpha, beta, scratch.data());
          const std::string name = kernel.name + ", " + test.name() + ", alpha " + std::to_string(alpha) + ", beta " +
                                   std::to_string(beta) + (is_cut ? ", in parts" : "");
          check::report(c == expected, __FILE__, __LINE__, name);
          check::report(scratch.is_intact(), __FILE__, __LINE__, name + ": scratch overrun");
        }
      }
    }
  }
}

template <typename T>
void check_simd(hostmp::SimdLevel level, const char* name) {
  constexpr abi::cudaDataType_t kType = Type<T>::number;
  const Extents extents = {{1, 1, 1},     {1, 40, 7},   {3, 5, 2},    {5, 4, 300},   {16, 8, 17},
                           {47, 9, 33},   {48, 16, 64}, {49, 17, 65}, {100, 3, 257}, {7, 515, 30},
                           {50, 60, 513}, {390, 18, 5}, {515, 7, 9}};
  Kernel<T> kernel = {name,
                      Has(level),
                      [level](const KSegments& parts, auto alpha, auto beta, char* scratch) {
                        hostmp::SimdGemm(level, kType, parts, alpha, beta == 1, scratch);
                      },
                      [level](int64_t m, int64_t n, int64_t k) { return SimdGemmScratch(level, kType, m, n, k); },
                      draw_uniform,
                      extents,
                      {{1, 0}, {1, 1}, {2, 0}},
                      /*unit=*/1,
                      /*ops=*/3,
                      level != hostmp::SimdLevel::kPortable};
  check_kernel(kernel);
  if (kIsComplex<T>) return;
  kernel.name += " of few columns";
  kernel.most_columns = hostmp::kSmallN;
  kernel.scratch = [](int64_t, int64_t, int64_t) { return 0; };
  kernel.multiply = [level](const KSegments& parts, auto alpha, auto beta, char*) {
    hostmp::SimdSmallNGemm(level, kType, parts, alpha, beta == 1);
  };
  check_kernel(kernel);
}

// The kernel for n columns and A as it is.
template <typename T>
hostmp::KernelChoice fixed_order(int64_t n) {
  return hostmp::KernelOf({Type<T>::number, Type<T>::number, abi::CUBLAS_OP_N, n,
                           /*is_fixed_order=*/true, /*is_alpha_one=*/true});
}

// The first m rows and n columns of a product, of k from `begin` to the last cut.
template <typename T>
auto multiply(const Case<T>& test, int64_t m, int64_t n, int64_t begin, const std::vector<int64_t>& cuts,
              bool adds = false) {
  auto c = test.c;
  KSegments parts = test.parts(begin, cuts, c.data());
  for (Product& part : parts) part.m = m, part.n = n;
  Scratch scratch(hostmp::ScratchBytes(fixed_order<T>(n), m, n, cuts.back() - begin));
  hostmp::Multiply(fixed_order<T>(n), parts, 1, adds, scratch.data());
  check::report(scratch.is_intact(), __FILE__, __LINE__, test.name() + ": scratch overrun");
  return c;
}

// Whether the first m rows and n columns have the same bits.
template <typename T, typename Sums>
bool is_same(const Case<T>& test, int64_t m, int64_t n, const Sums& part, const Sums& whole) {
  for (int64_t at = 0; at < n * test.ldc(); at += test.ldc()) {
    const auto begin = static_cast<size_t>(at);
    if (std::memcmp(&part[begin], &whole[begin], static_cast<size_t>(m) * sizeof(part[0])) != 0) return false;
  }
  return true;
}

// The whole is the sum of the K blocks, each alone, in ascending order, for any order within a K block.
template <typename T>
void test_extents_and_cuts() {
  constexpr int64_t kM = 70, kN = 70;
  const hostmp::Kernel kernel = fixed_order<T>(kN).kernel;
  const int64_t unit = hostmp::KUnit(kernel), k_block = hostmp::KBlockDepth(kernel), k = 2 * k_block + 188;
  const Case<T> test(abi::CUBLAS_OP_N, abi::CUBLAS_OP_T, kM, kN, k, draw_uniform, 2);
  const auto whole = multiply(test, kM, kN, 0, {k});
  for (int64_t m = 1; m <= kM; ++m) {
    for (const int64_t n : {1 + m % 20, kN + 1 - m}) {
      check::report(is_same(test, m, n, multiply(test, m, n, 0, {k}), whole), __FILE__, __LINE__,
                    test.name() + " cut off at " + std::to_string(m) + "x" + std::to_string(n));
    }
  }
  std::vector<int64_t> cuts;
  for (int64_t cut = unit; cut < k; cut += (cuts.size() % 2 ? 13 : 1) * unit) {
    check::report(same(multiply(test, kM, kN, 0, {cut, k}), whole), __FILE__, __LINE__,
                  test.name() + " cut at " + std::to_string(cut));
    cuts.push_back(cut);
  }
  cuts.push_back(k);
  check::report(same(multiply(test, kM, kN, 0, cuts), whole), __FILE__, __LINE__, test.name() + " cut everywhere");
  auto total = multiply(test, kM, kN, 0, {k_block});
  for (int64_t begin = k_block; begin < k; begin += k_block) {
    auto sums = multiply(test, kM, kN, begin, {std::min(begin + k_block, k)});
    for (int64_t i = 0; i < kM * kN; ++i) test.at(&total, i % kM, i / kM) += test.at(&sums, i % kM, i / kM);
  }
  check::report(same(total, whole), __FILE__, __LINE__, test.name() + " K block by K block");
}

// With JAXMP_ISA, only the choice among kernels differs: the run without it calls each of these kernels by its level.
bool tests_each_level() { return !std::getenv("JAXMP_ISA"); }

template <typename T>
void test_type() {
  if (tests_each_level()) {
    check_simd<T>(hostmp::SimdLevel::kAvx512, "avx512");
    check_simd<T>(hostmp::SimdLevel::kAvx2, "avx2");
    check_simd<T>(hostmp::SimdLevel::kNeon, "neon");
    check_simd<T>(hostmp::SimdLevel::kPortable, "portable");
  }
  test_extents_and_cuts<T>();
}

TEST(test_types) {
  test_type<float>();
  test_type<Complex64>();
  test_type<BFloat16>();
  if (check::kIsSlow) return;  // the same code, for other types
  test_type<double>();
  test_type<Complex128>();
  test_type<Float16>();
}

// Few columns of bf16 go to a kernel of their own, which writes out what the instruction does: also where products
// underflow, overflow and cancel, and k ends inside a block. (With JAXMP_ISA each instruction has its turn.)
TEST(test_few_columns_of_bf16_have_the_bits_of_many) {
  const int64_t unit = hostmp::KUnit(fixed_order<BFloat16>(33).kernel);
  if (unit == 1) return;
  std::mt19937 random(3);
  for (const uint32_t lowest : {30u, 56u, 120u, 180u}) {  // exponent; of a product of two: -194 to 107, all in all
    const auto draw = [lowest](std::mt19937& random) {
      const uint32_t bits = (random() & 0x807fu) << 16 | (lowest + random() % 14) << 23;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return double{value};
    };
    for (const int64_t k : {1, 2, 30, 31, 32, 33, 700, 2085}) {
      for (const auto trans_b : {abi::CUBLAS_OP_N, abi::CUBLAS_OP_T}) {
        const Case<BFloat16> test(abi::CUBLAS_OP_N, trans_b, static_cast<int64_t>(1 + random() % 90), 33, k, draw,
                                  random());
        for (const bool adds : {false, true}) {
          const auto many = multiply(test, test.m, test.n, 0, {k}, adds);
          for (int64_t n = 1; n <= hostmp::kBf16SmallN + 1; ++n) {
            const auto few = multiply(test, test.m, n, 0, n % 2 ? std::vector<int64_t>{k} : cuts_of(k, unit), adds);
            check::report(
                is_same(test, test.m, n, few, many), __FILE__, __LINE__,
                std::to_string(n) + " columns of " + test.name() + ", exponents from " + std::to_string(lowest));
          }
        }
      }
    }
  }
}

const Extents kBf16Extents = {{1, 1, 1},     {1, 33, 2},    {16, 16, 32},   {17, 15, 31},   {32, 32, 64},
                              {33, 31, 65},  {48, 8, 512},  {49, 9, 513},   {31, 65, 1025}, {5, 530, 40},
                              {70, 513, 33}, {257, 33, 35}, {530, 3, 1030}, {64, 96, 1024}, {96, 64, 2049}};

hostmp::KernelChoice chosen(abi::cublasOperation_t trans_a, int64_t n, float alpha) {
  return hostmp::KernelOf({abi::CUDA_R_16BF, abi::CUDA_R_16BF, trans_a, n, /*is_fixed_order=*/false, alpha == 1});
}

TEST(test_bf16_kernels) {
  const std::vector<std::pair<float, float>> scales = {{1, 0}, {1, 1}, {2, 0}, {0, 1}};
  Kernel<BFloat16> kernel = {"AVX512_BF16",
                             hostmp::cpu().avx512_bf16,
                             hostmp::Avx512Bf16Gemm,
                             hostmp::Avx512Bf16GemmScratch,
                             draw_integer,
                             kBf16Extents,
                             scales,
                             hostmp::kBf16Unit};
  kernel.scales.insert(kernel.scales.end(), {{-1, 0.5f}, {1, -2}});
  if (check::kIsSlow) kernel.extents.resize(kernel.extents.size() - 2);  // less the largest
  check_kernel(kernel);
  kernel.name = "AMX", kernel.is_available = hostmp::cpu().amx, kernel.unit = hostmp::kAmxUnit;
  kernel.multiply = hostmp::AmxGemm, kernel.scratch = hostmp::AmxGemmScratch;
  check_kernel(kernel);
  // k may be cut anywhere: some of these cuts are at the end of an instruction's k.
  kernel.name = "the chosen kernel", kernel.is_available = true, kernel.unit = 8, kernel.scales = scales;
  kernel.multiply = [](const KSegments& parts, float alpha, float beta, char* scratch) {
    const Product& p = parts.front();
    hostmp::Multiply(chosen(p.trans_a, p.n, alpha), parts, alpha, beta == 1, scratch);
  };
  kernel.scratch = [](int64_t m, int64_t n, int64_t k) {
    return std::max(hostmp::ScratchBytes(chosen(abi::CUBLAS_OP_N, n, 1), m, n, k),
                    hostmp::ScratchBytes(chosen(abi::CUBLAS_OP_T, n, 1), m, n, k));
  };
  check_kernel(kernel);
}

TEST(test_int8_kernels) {
  if (!tests_each_level()) return;
  using hostmp::Int8Level;
  std::mt19937 random(1);
  // Around the ends of words, vectors, register tiles, runs that are transposed together and blocks.
  Extents extents = {{1, 1, 1}, {16, 4, 2}, {48, 8, 64}, {33, 31, 65}, {97, 67, 770}, {5, 3, 2050}};
  if (!check::kIsSlow) extents.insert(extents.end(), {{400, 9, 130}, {7, 530, 67}, {385, 9, 1537}, {9, 515, 800}});
  for (int i = 0; i < (check::kIsSlow ? 10 : 60); ++i) {
    const auto any = [&](unsigned most) { return 1 + static_cast<int64_t>(random() % most); };
    extents.push_back({any(110), any(80), any(150)});
  }
  for (const auto& [level, name] : {std::pair(Int8Level::kPortable, "portable"),
                                    {Int8Level::kNeonDotprod, "neon_dotprod"},
                                    {Int8Level::kAvx2, "avx2"},
                                    {Int8Level::kAvxVnni, "avx_vnni"},
                                    {Int8Level::kAvx512Vnni, "avx512_vnni"},
                                    {Int8Level::kAmx, "amx"}}) {
    Kernel<int8_t> kernel = {
        name,
        Has(level),
        [level = level](const KSegments& parts, uint32_t alpha, uint32_t beta, char* scratch) {
          Int8Gemm(level, parts[0], static_cast<int32_t>(alpha), beta == 1, scratch);
        },
        [level = level](int64_t m, int64_t n, int64_t k) { return Int8GemmScratch(level, m, n, k); },
        [](std::mt19937& random) { return static_cast<double>(static_cast<int8_t>(random())); },
        extents,
        {{1, 0}, {1, 1}, {random(), 0}, {random(), 1}},
        /*unit=*/0};
    check_kernel(kernel);
    kernel.draw = [](std::mt19937&) { return static_cast<double>(INT8_MIN); };
    kernel.extents.resize(check::kIsSlow ? 6 : 10);
    check_kernel(kernel);
  }
}

}  // namespace
}  // namespace jaxmp::test
