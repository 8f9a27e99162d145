#include "csrc/hostmp/numeric/low_precision.h"

#include <algorithm>
#include <cmath>

#include "csrc/hostmp/cpu/dispatch.h"

namespace jaxmp::hostmp {
namespace {

using abi::cudaDataType_t;

// A format with `kMantissa` stored bits and exponent bias `kBias`; `kMagnitude` masks all but the sign. Magnitudes from
// `kNan` on are NaN, and `kInfinity` is infinite, where the format has them.
struct E4m3 {
  static constexpr uint32_t kMantissa = 3, kBias = 7, kMagnitude = 0x7f, kSign = 0x80, kInfinity = 0x100, kNan = 0x7f;
  static constexpr uint32_t kLargest = 0x7e;
};
struct E5m2 {
  static constexpr uint32_t kMantissa = 2, kBias = 15, kMagnitude = 0x7f, kSign = 0x80, kInfinity = 0x7c, kNan = 0x7d;
  static constexpr uint32_t kLargest = 0x7b;
};
struct E2m1 {
  static constexpr uint32_t kMantissa = 1, kBias = 1, kMagnitude = 0x7, kSign = 0x8, kInfinity = 0x100, kNan = 0x100;
  static constexpr uint32_t kLargest = 0x7;
};

// Without a subnormal float on the way: threads of XLA run with those flushed to zero.
template <typename Format>
JAXMP_INLINE float decode_one(uint32_t bits) {
  const uint32_t magnitude = bits & Format::kMagnitude;
  const uint32_t normal = (magnitude << (23 - Format::kMantissa)) + ((127 - Format::kBias) << 23);
  // With exponent 0 the leading bit is not there: 2 (1 + f) 2^-bias - 2^(1 - bias) = f 2^(1 - bias).
  const float subnormal = float_of(normal + (1u << 23)) - float_of((128 - Format::kBias) << 23);
  uint32_t value = magnitude < (1u << Format::kMantissa) ? bits_of(subnormal) : normal;
  value = magnitude >= Format::kInfinity ? 0x7f800000u : value;
  value = magnitude >= Format::kNan ? 0x7fc00000u : value;
  return float_of(value | (bits & Format::kSign) << (Format::kSign == 0x8 ? 28 : 24));
}

template <typename Format>
JAXMP_INLINE uint32_t encode_one(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 31) * Format::kSign;
  constexpr uint32_t kShift = 23 - Format::kMantissa;
  constexpr uint32_t kSmallestNormal = (128 - Format::kBias) << 23;
  // Adding 2^23 times the distance of the subnormal numbers leaves the rounded multiple of it in the low bits.
  constexpr uint32_t kUnit = (128 - Format::kBias + 23 - Format::kMantissa) << 23;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kUnit)) - kUnit;
  const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
  const uint32_t normal = (rounded >> kShift) - ((127 - Format::kBias) << Format::kMantissa);
  uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
  // Compared ahead of rounding, so that the rounding of a huge number cannot wrap around.
  constexpr uint32_t kLimit = (Format::kLargest << kShift) + ((127 - Format::kBias) << 23);
  code = magnitude > kLimit ? Format::kLargest : code;
  constexpr uint32_t kNan = Format::kNan <= Format::kMagnitude ? Format::kMagnitude : Format::kLargest;
  code = magnitude > 0x7f800000u ? kNan : code;
  return code | sign;
}

JAXMP_INLINE uint16_t cut(float value) { return static_cast<uint16_t>(bits_of(value) >> 16); }

template <typename Format>
JAXMP_INLINE void decode_bytes(const uint8_t* from, int64_t count, float scale, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = cut(decode_one<Format>(from[i]) * scale);
}
JAXMP_INLINE void decode_halves(const uint8_t* from, int64_t count, float scale, uint16_t* to) {
  for (int64_t i = 0; i < count / 2; ++i) {
    to[2 * i] = cut(decode_one<E2m1>(from[i] & 0xfu) * scale);
    to[2 * i + 1] = cut(decode_one<E2m1>(from[i] >> 4) * scale);
  }
}
JAXMP_INLINE void decode_integers(const int8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = cut(static_cast<float>(from[i]));
}

JAXMP_DISPATCH(decode_e4m3, (const uint8_t* from, int64_t count, float scale, uint16_t* to), (from, count, scale, to),
               decode_bytes<E4m3>(from, count, scale, to))
JAXMP_DISPATCH(decode_e5m2, (const uint8_t* from, int64_t count, float scale, uint16_t* to), (from, count, scale, to),
               decode_bytes<E5m2>(from, count, scale, to))
JAXMP_DISPATCH(decode_e2m1, (const uint8_t* from, int64_t count, float scale, uint16_t* to), (from, count, scale, to),
               decode_halves(from, count, scale, to))
JAXMP_DISPATCH(decode_s8, (const int8_t* from, int64_t count, uint16_t* to), (from, count, to),
               decode_integers(from, count, to))

template <typename Format>
JAXMP_INLINE void encode_bytes(const float* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(encode_one<Format>(from[i]));
}
JAXMP_DISPATCH(encode_e4m3, (const float* from, int64_t count, uint8_t* to), (from, count, to),
               encode_bytes<E4m3>(from, count, to))
JAXMP_DISPATCH(encode_e5m2, (const float* from, int64_t count, uint8_t* to), (from, count, to),
               encode_bytes<E5m2>(from, count, to))

}  // namespace

void decode(cudaDataType_t type, const void* from, int64_t count, float scale, BFloat16* to) {
  uint16_t* const out = &to->bits;
  switch (type) {
    case abi::CUDA_R_8F_E4M3:
      return decode_e4m3_best(static_cast<const uint8_t*>(from), count, scale, out);
    case abi::CUDA_R_8F_E5M2:
      return decode_e5m2_best(static_cast<const uint8_t*>(from), count, scale, out);
    case abi::CUDA_R_4F_E2M1:
      return decode_e2m1_best(static_cast<const uint8_t*>(from), count, scale, out);
    default:
      return decode_s8_best(static_cast<const int8_t*>(from), count, out);
  }
}

void decode(cudaDataType_t type, const void* from, int64_t count, float* to) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(from);
  for (int64_t i = 0; i < count; ++i) {
    switch (type) {
      case abi::CUDA_R_8F_E4M3:
        to[i] = decode_one<E4m3>(bytes[i]);
        break;
      case abi::CUDA_R_8F_E5M2:
        to[i] = decode_one<E5m2>(bytes[i]);
        break;
      case abi::CUDA_R_4F_E2M1:
        to[i] = decode_one<E2m1>(i % 2 ? bytes[i / 2] >> 4 : bytes[i / 2] & 0xfu);
        break;
      default:
        to[i] = static_cast<float>(static_cast<int8_t>(bytes[i]));
    }
  }
}

void encode(cudaDataType_t type, const float* from, int64_t count, void* to) {
  uint8_t* const bytes = static_cast<uint8_t*>(to);
  if (type == abi::CUDA_R_8F_E4M3) return encode_e4m3_best(from, count, bytes);
  if (type == abi::CUDA_R_8F_E5M2) return encode_e5m2_best(from, count, bytes);
  for (int64_t i = 0; i < count / 2; ++i) {
    bytes[i] = static_cast<uint8_t>(encode_one<E2m1>(from[2 * i]) | encode_one<E2m1>(from[2 * i + 1]) << 4);
  }
}

float largest(cudaDataType_t type) {
  return type == abi::CUDA_R_8F_E4M3 ? 448.0f : type == abi::CUDA_R_8F_E5M2 ? 57344.0f : 6.0f;
}

float ue4m3(uint8_t bits) { return decode_one<E4m3>(bits & 0x7fu); }

uint8_t ue8m0_above(float scale) {
  const uint32_t bits = bits_of(scale), exponent = bits >> 23 & 0xff, mantissa = bits & 0x7fffff;
  const bool rounds_up = exponent == 0 ? mantissa > 0x400000 : mantissa > 0 && exponent < 254;
  return static_cast<uint8_t>(exponent + (rounds_up ? 1 : 0));
}

}  // namespace jaxmp::hostmp
