// Which kernel multiplies on which processor. A choice only names a kernel, so one machine tests all processors'.

#include "csrc/cublasmp/dtypes.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/gemm/kernel_choice.h"
#include "tests/cpp/check.h"

namespace jaxmp::test {
namespace {

using namespace abi;  // NOLINT: cuBLAS's own names, everywhere below
using hostmp::Conversion;
using hostmp::Cpu;
using hostmp::Kernel;

const Cpu kPortable, kAvx2 = {true}, kAvx512 = {true, true}, kCascadeLake = {true, true, true},
                     kZen4 = {true, true, true, true}, kSapphireRapids = {true, true, true, true, true};
constexpr auto kN = CUBLAS_OP_N, kT = CUBLAS_OP_T;

void expect(const Cpu& processor, const hostmp::ProductKind& product, Kernel kernel, cudaDataType_t type,
            Conversion conversion, int line) {
  const_cast<Cpu&>(hostmp::cpu()) = processor;
  const hostmp::KernelChoice choice = hostmp::KernelOf(product);
  const bool is_right = choice.kernel == kernel && choice.type == type && choice.conversion == conversion;
  check::report(is_right, __FILE__, line,
                hostmp::Describe(choice) + ", kernel " + std::to_string(static_cast<int>(choice.kernel)));
}

// A product of numbers of one type, summed in any order and with alpha 1.
hostmp::ProductKind plain(cudaDataType_t type, int64_t n, cublasOperation_t trans_a = kN) {
  return {type, type, trans_a, n, false, true};
}
hostmp::ProductKind ordered(cudaDataType_t type, int64_t n) { return {type, type, kN, n, true, true}; }
hostmp::ProductKind scaled(cudaDataType_t type, int64_t n) { return {type, type, kN, n, false, false}; }
hostmp::ProductKind pair(cudaDataType_t a, cudaDataType_t b, int64_t n, bool is_fixed_order = false) {
  return {a, b, kN, n, is_fixed_order, false};
}

#define EXPECT(processor, product, kernel, type, conversion) \
  expect(processor, product, Kernel::kernel, type, Conversion::conversion, __LINE__)

void check_one_type(bool has_openblas) {
  EXPECT(kPortable, plain(CUDA_R_32F, 1), kBlas, CUDA_R_32F, kNone);
  EXPECT(kAvx2, plain(CUDA_R_32F, 16), kSimdFewColumns, CUDA_R_32F, kNone);
  EXPECT(kAvx2, plain(CUDA_R_32F, 16, kT), kBlas, CUDA_R_32F, kNone);
  EXPECT(kAvx2, plain(CUDA_R_64F, 17), kBlas, CUDA_R_64F, kNone);
  EXPECT(kAvx2, plain(CUDA_C_32F, 1), kBlas, CUDA_C_32F, kNone);
  EXPECT(kAvx512, plain(CUDA_R_32F, 256), kSimd, CUDA_R_32F, kNone);
  expect(kAvx512, plain(CUDA_R_32F, 257), has_openblas ? Kernel::kSimd : Kernel::kBlas, CUDA_R_32F, Conversion::kNone,
         __LINE__);
  EXPECT(kAvx512, plain(CUDA_R_64F, 17), kBlas, CUDA_R_64F, kNone);
  EXPECT(kAvx512, ordered(CUDA_R_64F, 17), kSimd, CUDA_R_64F, kNone);
  EXPECT(kPortable, ordered(CUDA_R_32F, 16), kSimdFewColumns, CUDA_R_32F, kNone);
  EXPECT(kAvx2, ordered(CUDA_C_64F, 1), kSimd, CUDA_C_64F, kNone);
  EXPECT(kAvx2, plain(CUDA_R_16BF, 17), kWideningBlas, CUDA_R_16BF, kNone);
  EXPECT(kAvx512, plain(CUDA_R_16F, 17), kSimd, CUDA_R_16F, kNone);
  EXPECT(kZen4, plain(CUDA_R_16BF, 4), kAvx512Bf16FewColumns, CUDA_R_16BF, kNone);
  EXPECT(kZen4, plain(CUDA_R_16BF, 5), kAvx512Bf16, CUDA_R_16BF, kNone);
  EXPECT(kZen4, ordered(CUDA_R_16F, 5), kSimdFewColumns, CUDA_R_16F, kNone);
  EXPECT(kSapphireRapids, plain(CUDA_R_16BF, 4, kT), kAmx, CUDA_R_16BF, kNone);
  EXPECT(kSapphireRapids, scaled(CUDA_R_16BF, 4), kAmx, CUDA_R_16BF, kNone);
  EXPECT(kSapphireRapids, ordered(CUDA_R_16BF, 4), kAmxFewColumns, CUDA_R_16BF, kNone);
}

TEST(test_one_type) {
  check_one_type(/*has_openblas=*/false);
  check::load_blas();
  check_one_type(/*has_openblas=*/true);
}

TEST(test_conversions) {
  EXPECT(kAvx2, pair(CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, 40), kWideningBlas, CUDA_R_16BF, kDecoded);
  EXPECT(kSapphireRapids, pair(CUDA_R_8I, CUDA_R_16BF, 16), kSimdFewColumns, CUDA_R_32F, kDecodedFewColumns);
  EXPECT(kSapphireRapids, pair(CUDA_R_8I, CUDA_R_16BF, 16, true), kAmx, CUDA_R_16BF, kDecoded);
  EXPECT(kSapphireRapids, pair(CUDA_R_8I, CUDA_R_16BF, 17), kAmx, CUDA_R_16BF, kDecoded);
  EXPECT(kAvx2, pair(CUDA_R_8I, CUDA_R_16BF, 64), kSimdFewColumns, CUDA_R_32F, kDecodedFewColumns);
  EXPECT(kAvx2, pair(host_types::kS4, CUDA_R_16BF, 17), kBlas, CUDA_R_32F, kDecoded);
}

TEST(test_int8) {
  Cpu avx_vnni = kAvx2;
  avx_vnni.avx_vnni = true;
  const std::pair<const Cpu*, const char*> kernels[] = {
      {&kPortable, "portable"},       {&kAvx2, "AVX2"},        {&avx_vnni, "AVX-VNNI"},  {&kAvx512, "AVX2"},
      {&kCascadeLake, "AVX512_VNNI"}, {&kZen4, "AVX512_VNNI"}, {&kSapphireRapids, "AMX"}};
  for (const auto& [processor, name] : kernels) {
    EXPECT(*processor, ordered(CUDA_R_8I, 4), kInt8, CUDA_R_8I, kNone);
    EXPECT(*processor, plain(CUDA_R_8I, 400, kT), kInt8, CUDA_R_8I, kNone);
    CHECK_EQ(hostmp::DescribeKernels(CUDA_R_8I), std::string(name) + " kernel of hostmp, summed in s32");
  }
}

}  // namespace
}  // namespace jaxmp::test
