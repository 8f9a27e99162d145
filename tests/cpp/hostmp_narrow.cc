// Without these fp8 could be decoded wrongly in its corners (zero, subnormal numbers, NaN), saturate where it should
// not, and scales could be read from another block's place.

#include "csrc/hostmp/numeric/low_precision.h"
#include "csrc/hostmp/numeric/scales.h"
#include "tests/cpp/check.h"
#include "tests/cpp/placement.h"

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

// Formats that are decoded only (ml_dtypes).
constexpr Format kDecoded[] = {{host_types::kE3M4, 3, 4, 3, true, true},
                               {host_types::kE4M3Ieee, 4, 3, 7, true, true},
                               {host_types::kE4M3B11Fnuz, 4, 3, 11, false, false, true},
                               {host_types::kE4M3Fnuz, 4, 3, 8, false, false, true},
                               {host_types::kE5M2Fnuz, 5, 2, 16, false, false, true}};

// Returns the value of a code, from the format's definition (OCP FP8 and MX specifications).
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

TEST(test_decode) {
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
TEST(test_decode_integers) {
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
  for (const auto type : {host_types::kS4, host_types::kU4, CUDA_R_4F_E2M1}) {
    for (int64_t first : {0, 1, 5}) {
      int8_t bytes[250];
      hostmp::Unpack(type, codes.data(), first, 250, bytes);
      const float unit = type == CUDA_R_4F_E2M1 ? 0.5f : 1.0f;
      for (int64_t i = 0; i < 250; ++i) CHECK_EQ(unit * bytes[i], decoded(type, first, 250)[i]);
    }
  }
}

uint8_t encoded(const Format& f, float value) {
  const float values[2] = {value, 0};
  uint8_t code[2] = {0, 0};
  hostmp::Encode(f.type, values, 2, code);
  return f.bits() == 4 ? code[0] & 0xf : code[0];
}

// Every number comes back; halfway between two neighbours the even one; beyond the last, the last.
TEST(test_encode) {
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

TEST(test_scales) {
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

}  // namespace
}  // namespace jaxmp::test
