// Without these fp8 could be decoded wrongly in its corners (zero, subnormal numbers, NaN), saturate where it should
// not, scales could be read from another block's place, and hostmp could take what cuBLASLt refuses.
#include <cmath>

#include "csrc/hostmp/gemm/cblas.h"
#include "csrc/hostmp/numeric/low_precision.h"
#include "csrc/hostmp/numeric/scales.h"
#include "tests/cpp/hostmp_arguments.h"
#include "tests/cpp/instruction_set.h"

namespace jaxmp::test {
namespace {

struct Format {
  cudaDataType_t type;
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity, has_nan, is_fnuz = false;
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
};
constexpr Format kFormats[] = {{CUDA_R_8F_E4M3, 4, 3, 7, false, true},
                               {CUDA_R_8F_E5M2, 5, 2, 15, true, true},
                               {CUDA_R_4F_E2M1, 2, 1, 1, false, false}};

// Those that are decoded only (ml_dtypes).
constexpr Format kDecoded[] = {{host_types::kE3M4, 3, 4, 3, true, true},
                               {host_types::kE4M3Ieee, 4, 3, 7, true, true},
                               {host_types::kE4M3B11Fnuz, 4, 3, 11, false, false, true},
                               {host_types::kE4M3Fnuz, 4, 3, 8, false, false, true},
                               {host_types::kE5M2Fnuz, 5, 2, 16, false, false, true}};

// What a code means, from the format's definition (OCP FP8 and MX specifications).
double meaning(const Format& f, int code) {
  if (f.is_fnuz && code == 0x80) return NAN;
  const int mantissa = code & ((1 << f.mantissa_bits) - 1);
  const int exponent = (code >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const double sign = code >> (f.bits() - 1) ? -1 : 1;
  const int top = (1 << f.exponent_bits) - 1;
  if (f.has_infinity && exponent == top) return mantissa == 0 ? sign * INFINITY : NAN;
  if (!f.has_infinity && f.has_nan && exponent == top && mantissa == (1 << f.mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - f.bias - f.mantissa_bits);
}

bool is_same(double x, double y) {
  return (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
}

// Codes, two in a byte for the type of 4 bits.
std::vector<uint8_t> all_codes(const Format& f) {
  std::vector<uint8_t> codes;
  const int count = 1 << f.bits();
  for (int code = 0; code < count; code += f.bits() == 4 ? 2 : 1) {
    codes.push_back(static_cast<uint8_t>(f.bits() == 4 ? code | (code + 1) << 4 : code));
  }
  return codes;
}

void test_decode() {
  std::vector<Format> formats(std::begin(kFormats), std::end(kFormats));
  formats.insert(formats.end(), std::begin(kDecoded), std::end(kDecoded));
  for (const Format& f : formats) {
    const std::vector<uint8_t> codes = all_codes(f);
    const int count = 1 << f.bits();
    std::vector<float> wide(static_cast<size_t>(count)), from_bf16(wide.size());
    std::vector<hostmp::BFloat16> bf16(wide.size());
    hostmp::Decode(f.type, codes.data(), 0, count, 1.0f, wide.data());
    hostmp::Decode(f.type, codes.data(), 0, count, 0.5f, bf16.data());
    hostmp::Widen(bf16.data(), from_bf16.data(), count);
    for (int code = 0; code < count; ++code) {
      const double want = meaning(f, code);
      CHECK(is_same(wide[static_cast<size_t>(code)], want));
      CHECK(is_same(from_bf16[static_cast<size_t>(code)], want / 2));
    }
  }
}

// Integers, exponents, and runs that begin within a byte.
void test_decode_integers() {
  std::vector<uint8_t> codes(256);
  for (size_t code = 0; code < 256; ++code) codes[code] = static_cast<uint8_t>(code);
  float wide[256];
  const auto decoded = [&](cudaDataType_t type, int64_t first, int64_t count) {
    hostmp::Decode(type, codes.data(), first, count, 1.0f, wide);
    return wide;
  };
  for (int64_t first : {0, 1, 5}) {
    for (int64_t i = 0; i < 250; ++i) {
      const auto code = static_cast<uint8_t>(first + i), byte = static_cast<uint8_t>((first + i) / 2);
      const int half = (first + i) % 2 ? byte >> 4 : byte & 0xf;
      CHECK_EQ(decoded(CUDA_R_8I, first, 250)[i], static_cast<float>(static_cast<int8_t>(code)));
      CHECK_EQ(decoded(CUDA_R_8U, first, 250)[i], static_cast<float>(code));
      CHECK_EQ(decoded(host_types::kU4, first, 250)[i], static_cast<float>(half));
      CHECK_EQ(decoded(host_types::kS4, first, 250)[i], static_cast<float>(half < 8 ? half : half - 16));
      CHECK_EQ(double{decoded(CUDA_R_4F_E2M1, first, 250)[i]}, meaning(kFormats[2], half));
      CHECK_EQ(decoded(host_types::kE8M0, first, 250)[i], std::ldexp(1.0f, code - 127));
    }
  }
  CHECK(std::isnan(decoded(host_types::kE8M0, 255, 1)[0]));
}

uint8_t encoded(const Format& f, float value) {
  const float values[2] = {value, 0};
  uint8_t code[2] = {0, 0};
  hostmp::Encode(f.type, values, 2, code);
  return f.bits() == 4 ? code[0] & 0xf : code[0];
}

// Every number comes back; halfway between two neighbours the even one; beyond the last, the last.
void test_encode() {
  for (const Format& f : kFormats) {
    const int sign = 1 << (f.bits() - 1);
    const float last = hostmp::Largest(f.type);
    for (int code = 0; meaning(f, code) < last; ++code) {
      const double low = meaning(f, code), high = meaning(f, code + 1);
      const auto middle = static_cast<float>((low + high) / 2);
      CHECK_EQ(int{encoded(f, static_cast<float>(low))}, code);
      CHECK_EQ(int{encoded(f, static_cast<float>(-low))}, code | sign);
      CHECK_EQ(int{encoded(f, middle)}, code + code % 2);
      CHECK_EQ(int{encoded(f, std::nextafter(middle, 0.0f))}, code);
      CHECK_EQ(int{encoded(f, std::nextafter(middle, 1e30f))}, code + 1);
    }
    const int largest = encoded(f, last);
    CHECK_EQ(meaning(f, largest), double{last});
    for (float huge : {std::nextafter(last, INFINITY), 1.5f * last, 3e38f, INFINITY}) {
      CHECK_EQ(int{encoded(f, huge)}, largest);
      CHECK_EQ(int{encoded(f, -huge)}, largest | sign);
    }
    if (f.has_nan) CHECK(std::isnan(meaning(f, encoded(f, NAN))));
  }
}

void test_scales() {
  CHECK_EQ(hostmp::Ue8m0(127), 1.0f);
  CHECK_EQ(hostmp::Ue8m0(254), std::ldexp(1.0f, 127));
  CHECK_EQ(hostmp::Ue8m0(0), std::ldexp(1.0f, -127));
  CHECK(std::isnan(hostmp::Ue8m0(255)));
  CHECK_EQ(hostmp::Ue4m3(0xc8), 4.0f);  // the sign is ignored
  CHECK_EQ(int{hostmp::Ue8m0Above(1.0f)}, 127);
  CHECK_EQ(int{hostmp::Ue8m0Above(1.0001f)}, 128);
  CHECK_EQ(int{hostmp::Ue8m0Above(0.0f)}, 0);
  CHECK_EQ(int{hostmp::Ue8m0Above(std::ldexp(1.0f, -127))}, 0);  // half of the smallest normal number
  CHECK_EQ(int{hostmp::Ue8m0Above(std::ldexp(1.5f, -127))}, 1);
  // The documentation's own formulas, tile by tile.
  for (int64_t outer = 0; outer < 300; ++outer) {
    for (int64_t inner = 0; inner < 10; ++inner) {
      const int64_t inners = 12;  // 10 rounded up to a tile
      const int64_t tile = (inner / 4 * 4 + outer / 128 * 128 / 128 * inners) * 128;
      CHECK_EQ(hostmp::TiledOffset(inner, outer, 10), tile + outer % 128 % 32 * 16 + outer % 128 / 32 * 4 + inner % 4);
    }
  }
}

Case narrow_case(Pattern pattern, int p, cudaDataType_t in, cudaDataType_t out, int64_t unit = 16) {
  Case c;
  c.pattern = pattern;
  c.p = p;
  c.m = 2 * unit * p, c.n = 3 * unit * p, c.k = 4 * unit * p;
  c.trans_a = CUBLAS_OP_T;
  c.in = in, c.out = out;
  c.alpha = 2;
  return c;
}

// Small integers, of which every sum is exact: the right numbers in the right places.
void test_placement(hostmp::Pool* pool) {
  for (Pattern pattern : {Pattern::kLocal, Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}) {
    for (cudaDataType_t in : {CUDA_R_8F_E4M3, CUDA_R_8I}) {
      Case c = narrow_case(pattern, pattern == Pattern::kLocal ? 1 : 2, in, in == CUDA_R_8I ? CUDA_R_32I : CUDA_R_32F);
      c.has_c = true, c.beta = 3;
      World world(c);
      world.run(pool);
      for (const std::string& error : world.errors) CHECK_EQ(error, "");
      Matrix product, magnitude;
      multiply(world, &product, &magnitude);
      const Matrix d = world.gather();
      for (size_t i = 0; i < d.values.size(); ++i) {
        CHECK_EQ(d.values[i], 2.0 * product.values[i] + 3.0 * world.c0.values[i]);
      }
      world.check_untouched();
    }
  }
}

const Case kTensor = narrow_case(Pattern::kLocal, 1, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3);

template <typename Change>
Outcome with(const Case& c, Change change) {
  const int before = check::failures;
  World world(c);  // complains of what it is refused, when it asks for the size of its workspaces
  check::failures = before;
  Arguments in(world);
  change(in);
  return Outcome(in.run());
}

const void* const kSome = &kTensor;

void set_modes(const Arguments& in, int a, int b) {
  in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_MODE, a);
  in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_MODE, b);
}

void test_refusals() {
  Case c = kTensor;
  c.trans_a = CUBLAS_OP_N;
  std::swap(c.m, c.k);
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "f8e4m3", "TRANSA=T and TRANSB=N");
  c = kTensor, c.in = CUDA_R_8F_E5M2;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "f8e5m2", "not f8e5m2 twice");
  c = kTensor, c.out = CUDA_R_64F;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "D is f64", "f16, bf16, f32, or f8e4m3");
  c = kTensor, c.out = CUDA_R_8F_E5M2;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "D is f8e5m2");
  c = kTensor, c.k = 24;
  REFUSED(with(c, [](Arguments&) {}), INVALID_VALUE, "the rows of A (k)", "multiple of 16", "got 24");
  c = kTensor, c.m = 8;
  REFUSED(with(c, [](Arguments&) {}), INVALID_VALUE, "the columns of A (m)", "multiple of 16", "got 8");
  c = kTensor, c.has_c = true;  // of D's type
  REFUSED(with(c, [](Arguments& in) { in.c = in.d, in.desc_c = in.desc_d; }), NOT_SUPPORTED, "C is f8e4m3",
          "C must be f16 or bf16");
  c = kTensor, c.epilog = CUBLASMP_MATMUL_EPILOGUE_GELU;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "no epilog GELU", "GELU_AUX");
  c = kTensor, c.in = CUDA_R_8I, c.out = CUDA_R_32I, c.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "RELU", "s8");
}

// A narrow operand beside a wide one has no scales, and takes the types of real numbers up to 32 bits.
void test_mixed_refusals() {
  Case c;
  c.m = c.n = c.k = 8;
  c.in = CUDA_R_64F, c.in_b = CUDA_R_8I, c.out = CUDA_R_64F;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "A is f64, B is s8 and D is f64", "f16, bf16 or f32");
  c.in = CUDA_R_16BF, c.out = CUDA_R_8F_E4M3;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "A is bf16, B is s8 and D is f8e4m3");
  c.out = CUDA_R_16BF, c.single = CUBLAS_COMPUTE_32F_FAST_TF32;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "the compute type is 77", "take CUBLAS_COMPUTE_32F");
  c = {}, c.m = c.n = c.k = 8, c.in = c.out = host_types::kE3M4;
  REFUSED(with(c, [](Arguments&) {}), NOT_SUPPORTED, "A is f8e3m4 and B is f8e3m4");
  c.in = CUDA_R_8F_E4M3, c.in_b = c.out = CUDA_R_16BF;
  REFUSED(with(c, [](Arguments& in) { set_modes(in, 3, 3); }), NOT_SUPPORTED, "attribute 17");
}

void test_scale_refusals() {
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 3, 4); }), NOT_SUPPORTED, "OUTER_VEC_FP32", "VEC128_FP32",
          "do not go together");
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 5, 5); }), NOT_SUPPORTED, "BLK128x128", "do not go together");
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 1, 1); }), NOT_SUPPORTED, "VEC16_UE4M3", "do not fit f8e4m3");
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 3, 3); }), NOT_SUPPORTED, "OUTER_VEC", "not f8e4m3");
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 7, 7); }), INVALID_VALUE, "is 7", "no scale mode");
  REFUSED(with(kTensor, [](Arguments& in) { set_modes(in, 2, 2); }), INVALID_VALUE, "D_OUT_SCALE_MODE is not set");
  Case wide = kTensor;
  wide.out = CUDA_R_32F;
  REFUSED(with(wide, [](Arguments& in) { set_modes(in, 3, 3); }), INVALID_VALUE, "A_SCALE_POINTER is not set");
  const auto pointer = [](int number) { return [number](Arguments& in) { in.attribute(number, kSome); }; };
  REFUSED(with(wide, pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER)), NOT_SUPPORTED, "D_SCALE_POINTER",
          "D is f32");
  REFUSED(with(wide, pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER)), NOT_SUPPORTED, "AMAX_D_POINTER");
  REFUSED(with(wide, pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER)), NOT_SUPPORTED,
          "EPILOGUE_AUX_SCALE_POINTER", "the aux is not fp8");
  Case plain;
  REFUSED(with(plain, pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER)), NOT_SUPPORTED,
          "attribute 13");
  Case integers = kTensor;
  integers.in = CUDA_R_8I, integers.out = CUDA_R_32I;
  REFUSED(with(integers, pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER)), NOT_SUPPORTED, "attribute 16");
}

// GELU's aux beside an fp8 D: of C's type, or e4m3 with everything around it e4m3 and f16.
void test_aux_refusals() {
  Case c = kTensor;
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_GELU_AUX;
  const auto aux = [](cudaDataType_t type) {
    return
        [type](Arguments& in) { in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, int{type}); };
  };
  CHECK_EQ(with(c, aux(CUDA_R_8F_E4M3)).message, "");
  CHECK_EQ(with(c, [](Arguments&) {}).message, "");  // unset it is D's type
  REFUSED(with(c, aux(CUDA_R_8F_E5M2)), NOT_SUPPORTED, "the aux is f8e5m2 beside D of f8e4m3", "the type of C");
  REFUSED(with(c, aux(CUDA_R_32F)), NOT_SUPPORTED, "the aux is f32");
  REFUSED(with(c,
               [&](Arguments& in) {
                 aux(CUDA_R_8F_E4M3)(in);
                 in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE, 2);
               }),
          NOT_SUPPORTED, "EPILOGUE_AUX_SCALE_MODE must be SCALAR_FP32, got VEC32_UE8M0");
  REFUSED(with(c,
               [&](Arguments& in) {
                 aux(CUDA_R_16F)(in);
                 in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER, kSome);
               }),
          NOT_SUPPORTED, "EPILOGUE_AUX_AMAX_POINTER is set, but the aux is not fp8");
  c.out = CUDA_R_16BF;
  REFUSED(with(c, aux(CUDA_R_8F_E4M3)), NOT_SUPPORTED, "the aux is f8e4m3 and D is bf16", "of one type");
}

}  // namespace
}  // namespace jaxmp::test

int main() {
  using namespace jaxmp;
  tests::LimitInstructionSet();
  CHECK(hostmp::LoadBlas(check::environment("JAXMP_BLAS")).ok());
  test::test_decode();
  test::test_decode_integers();
  test::test_encode();
  test::test_scales();
  {
    test::Threads pool(2);
    test::test_placement(&pool);
  }
  test::test_refusals();
  test::test_scale_refusals();
  test::test_mixed_refusals();
  test::test_aux_refusals();
  return check::summary("hostmp_narrow");
}
