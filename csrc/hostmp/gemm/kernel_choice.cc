#include "csrc/hostmp/gemm/kernel_choice.h"

#include "csrc/base/status.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/kernels/bf16_gemm.h"
#include "csrc/hostmp/kernels/int8_gemm.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {
namespace {

using namespace abi;  // NOLINT: cuBLAS's own names, everywhere below

// Up to this many columns our f32 kernel for AVX-512 is faster than every BLAS that was measured.
constexpr int64_t kAvx512Columns = 256;

// True if our kernel is the faster one when sums may be in any order: for few columns and, with AVX-512 and real
// numbers of up to 32 bits, for up to 256 columns, or for any number of columns next to OpenBLAS (docs/benchmarks.md).
bool IsSimdFasterThanBlas(cudaDataType_t type, const ProductKind& p) {
  if (Facts(type).is_complex) return false;
  if (p.n <= kSmallN && p.trans_a == CUBLAS_OP_N && simd_level() != SimdLevel::kPortable) return true;
  if (type == CUDA_R_64F || simd_level() != SimdLevel::kAvx512) return false;
  return p.n <= kAvx512Columns || blas_is_openblas();
}

// Chooses the fastest kernel (docs/benchmarks.md).
Kernel KernelOfType(cudaDataType_t type, const ProductKind& p, bool is_alpha_one) {
  const bool is_bf16 = type == CUDA_R_16BF, is_16bit = Facts(type).is_16bit, is_plain = p.trans_a == CUBLAS_OP_N;
  const bool has_few_bf16 = is_plain && p.n <= kBf16SmallN && is_alpha_one;
  if (is_bf16 && cpu().amx) return has_few_bf16 ? Kernel::kAmxFewColumns : Kernel::kAmx;
  if (is_bf16 && cpu().avx512_bf16) return has_few_bf16 ? Kernel::kAvx512Bf16FewColumns : Kernel::kAvx512Bf16;
  if (p.is_fixed_order || IsSimdFasterThanBlas(type, p)) {
    return is_plain && p.n <= kSmallN && !Facts(type).is_complex ? Kernel::kSimdFewColumns : Kernel::kSimd;
  }
  return is_16bit ? Kernel::kWideningBlas : Kernel::kBlas;
}

// Returns bf16, which holds all numbers of 8 bits and fewer; f32 if no bf16 instruction multiplies the wider operand.
cudaDataType_t DecodedType(const ProductKind& p) {
  const cudaDataType_t wide = Facts(p.a).is_low_precision ? p.b : p.a;
  const bool has_bf16_kernel = cpu().amx || cpu().avx512_bf16;
  return Facts(wide).is_low_precision || (wide == CUDA_R_16BF && has_bf16_kernel) ? CUDA_R_16BF : CUDA_R_32F;
}

// True if a mixed pair takes the kernel for few columns; in a fixed order only if many columns are decoded to f32 too.
// With AVX2, byte integers take it for up to 64 columns: OpenBLAS takes as long for the decoded numbers alone.
bool DecodesFewColumns(const ProductKind& p, cudaDataType_t decoded) {
  const bool is_byte_integer = p.a == CUDA_R_8I || p.a == CUDA_R_8U;
  const int64_t most = is_byte_integer && simd_level() == SimdLevel::kAvx2 ? 4 * kSmallN : kSmallN;
  const bool is_alike = decoded == CUDA_R_32F || !p.is_fixed_order;
  return is_alike && p.trans_a == CUBLAS_OP_N && p.n <= most && simd_level() != SimdLevel::kPortable;
}

const char* NameOfBlas(cudaDataType_t type) {
  if (Facts(type).is_complex) return type == CUDA_C_32F ? "cblas_cgemm" : "cblas_zgemm";
  return type == CUDA_R_64F ? "cblas_dgemm" : "cblas_sgemm";
}

std::string NameOfKernel(const KernelChoice& choice) {
  if (choice.kernel == Kernel::kBlas) return NameOfBlas(choice.type);
  if (choice.kernel == Kernel::kWideningBlas) return "widened to f32, cblas_sgemm";
  if (choice.kernel == Kernel::kInt8) {
    constexpr const char* kLevels[] = {"portable", "NEON dotprod", "AVX2", "AVX-VNNI", "AVX512_VNNI", "AMX"};
    return std::string(kLevels[static_cast<int>(int8_level())]) + " kernel of hostmp, summed in s32";
  }
  if (KUnit(choice.kernel) == kAmxUnit) return "AMX kernel of hostmp, summed in f32";
  if (KUnit(choice.kernel) == kBf16Unit) return "AVX512_BF16 kernel of hostmp, summed in f32";
  constexpr const char* kLevels[] = {"portable", "NEON", "AVX2", "AVX-512"};  // by SimdLevel
  return std::string(Facts(choice.type).is_16bit ? "widened to f32, " : "") + kLevels[static_cast<int>(simd_level())] +
         " kernel of hostmp";
}

}  // namespace

KernelChoice KernelOf(const ProductKind& p) {
  if (p.a == CUDA_R_8I && p.b == CUDA_R_8I) return {Kernel::kInt8, CUDA_R_8I};
  const bool is_a_low = Facts(p.a).is_low_precision, is_b_low = Facts(p.b).is_low_precision;
  if (is_a_low || is_b_low) {
    const bool is_mixed = is_a_low != is_b_low;
    const cudaDataType_t type = DecodedType(p);
    if (is_mixed && DecodesFewColumns(p, type)) {
      return {Kernel::kSimdFewColumns, CUDA_R_32F, Conversion::kDecodedFewColumns};
    }
    // Sums of two such operands are multiplied by alpha after the kernel.
    return {KernelOfType(type, p, p.is_alpha_one || !is_mixed), type, Conversion::kDecoded};
  }
  return {KernelOfType(p.a, p, p.is_alpha_one), p.a};
}

std::string Describe(const KernelChoice& choice) {
  const std::string name = NameOfKernel(choice);
  return choice.conversion == Conversion::kNone ? name : StrCat("decoded to ", Facts(choice.type).name, "; ", name);
}

std::string DescribeKernels(cudaDataType_t type) {
  const auto describe = [type](int64_t n) { return Describe(KernelOf({type, type, CUBLAS_OP_N, n, false, true})); };
  const std::string many = describe(INT64_MAX), few = describe(1);
  return many == few ? many : many + "; for few rows " + few;
}

int64_t KUnit(Kernel kernel) {
  if (kernel == Kernel::kAmx || kernel == Kernel::kAmxFewColumns) return kAmxUnit;
  return kernel == Kernel::kAvx512Bf16 || kernel == Kernel::kAvx512Bf16FewColumns ? kBf16Unit : 1;
}

int64_t KBlockDepth(Kernel kernel) { return KUnit(kernel) == kAmxUnit ? kAmxKC : kKC; }

}  // namespace jaxmp::hostmp
