#include "csrc/hostmp/numeric/low_precision.h"

#include <type_traits>

#include "csrc/hostmp/cpu/dispatch.h"

namespace jaxmp::hostmp {
namespace {

using abi::cudaDataType_t;

// A format with `kMantissa` stored bits and exponent bias `kBias`; `kMagnitude` masks all but the sign. Magnitudes from
// `kNan` on are NaN, and `kInfinity` is infinite, where the format has them.
template <uint32_t Mantissa, uint32_t Bias, uint32_t Infinity, uint32_t Nan, uint32_t Largest,
          uint32_t Magnitude = 0x7f>
struct FloatFormat {
  static constexpr uint32_t kMantissa = Mantissa, kBias = Bias, kInfinity = Infinity, kNan = Nan, kLargest = Largest;
  static constexpr uint32_t kMagnitude = Magnitude, kSign = Magnitude + 1;
  static constexpr bool kIsFnuz = false;  // whether the code of -0 is a NaN
};
template <uint32_t Mantissa, uint32_t Bias>
struct Fnuz : FloatFormat<Mantissa, Bias, 0x100, 0x100, 0x7f> {
  static constexpr bool kIsFnuz = true;
};
using E4m3 = FloatFormat<3, 7, 0x100, 0x7f, 0x7e>;
using E5m2 = FloatFormat<2, 15, 0x7c, 0x7d, 0x7b>;
using E2m1 = FloatFormat<1, 1, 0x100, 0x100, 0x7, 0x7>;
using E3m4 = FloatFormat<4, 3, 0x70, 0x71, 0x6f>;
using E4m3Ieee = FloatFormat<3, 7, 0x78, 0x79, 0x77>;

// Without a subnormal float on the way: threads of XLA run with those flushed to zero.
template <typename Format>
JAXMP_INLINE float DecodeOne(uint32_t bits) {
  const uint32_t magnitude = bits & Format::kMagnitude;
  const uint32_t normal = (magnitude << (23 - Format::kMantissa)) + ((127 - Format::kBias) << 23);
  // With exponent 0 the leading bit is not there: 2 (1 + f) 2^-bias - 2^(1 - bias) = f 2^(1 - bias).
  const float subnormal = FloatOf(normal + (1u << 23)) - FloatOf((128 - Format::kBias) << 23);
  uint32_t value = magnitude < (1u << Format::kMantissa) ? BitsOf(subnormal) : normal;
  value = magnitude >= Format::kInfinity ? 0x7f800000u : value;
  value = magnitude >= Format::kNan || (Format::kIsFnuz && bits == Format::kSign) ? 0x7fc00000u : value;
  return FloatOf(value | (bits & Format::kSign) << (Format::kSign == 0x8 ? 28 : 24));
}

template <typename Format>
JAXMP_INLINE uint32_t EncodeOne(float value) {
  const uint32_t bits = BitsOf(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 31) * Format::kSign;
  constexpr uint32_t kShift = 23 - Format::kMantissa;
  constexpr uint32_t kSmallestNormal = (128 - Format::kBias) << 23;
  // Adding 2^23 times the distance of the subnormal numbers leaves the rounded multiple of it in the low bits.
  constexpr uint32_t kUnit = (128 - Format::kBias + 23 - Format::kMantissa) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kUnit)) - kUnit;
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

// What a code of so many bits means.
template <typename Format>
struct OfFormat {
  static constexpr int kBits = Format::kSign == 0x8 ? 4 : 8;
  static JAXMP_INLINE float Value(uint32_t code) { return DecodeOne<Format>(code); }
};
template <int Bits>
struct Unsigned {
  static constexpr int kBits = Bits;
  static JAXMP_INLINE int Number(uint32_t code) { return static_cast<int>(code); }
  static JAXMP_INLINE float Value(uint32_t code) { return static_cast<float>(Number(code)); }
};
template <int Bits>
struct Signed {
  static constexpr int kBits = Bits, kSign = 1 << (Bits - 1);
  static JAXMP_INLINE int Number(uint32_t code) { return (static_cast<int>(code) ^ kSign) - kSign; }
  static JAXMP_INLINE float Value(uint32_t code) { return static_cast<float>(Number(code)); }
};
struct Exponent {
  static constexpr int kBits = 8;
  static JAXMP_INLINE float Value(uint32_t code) { return Ue8m0(static_cast<uint8_t>(code)); }
};

template <typename Code, typename To>
JAXMP_INLINE void Put(uint32_t code, float scale, To* to) {
  if constexpr (std::is_same_v<To, int8_t>) {
    *to = static_cast<int8_t>(Code::Number(code));
  } else if constexpr (std::is_same_v<To, float>) {
    *to = Code::Value(code) * scale;
  } else {
    *to = static_cast<To>(BitsOf(Code::Value(code) * scale) >> 16);
  }
}

template <typename Code, typename To>
JAXMP_INLINE void DecodeRun(const uint8_t* from, int64_t first, int64_t count, float scale, To* to) {
  if constexpr (Code::kBits == 8) {
    for (int64_t i = 0; i < count; ++i) Put<Code>(from[first + i], scale, to + i);
  } else {
    const uint8_t* bytes = from + first / 2;
    if (first % 2 != 0 && count > 0) {
      Put<Code>(*bytes++ >> 4, scale, to++);
      --count;
    }
    for (int64_t i = 0; i < count / 2; ++i) {
      Put<Code>(bytes[i] & 0xfu, scale, to + 2 * i);
      Put<Code>(bytes[i] >> 4, scale, to + 2 * i + 1);
    }
    if (count % 2 != 0) Put<Code>(bytes[count / 2] & 0xfu, scale, to + count - 1);
  }
}

// Code and To are one parameter, for a macro's argument has no comma.
template <typename CodeType, typename ToType>
struct Decoder {
  using Code = CodeType;
  using To = ToType;
};
JAXMP_DISPATCH_TEMPLATE(template <typename D>, Decode,
                        (const uint8_t* from, int64_t first, int64_t count, float scale, typename D::To* to),
                        <D>(from, first, count, scale, to),
                        (DecodeRun<typename D::Code, typename D::To>(from, first, count, scale, to)))

template <typename To>
void DecodeInto(cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, To* to) {
  const auto run = [&](auto code) {
    DecodeBest<Decoder<decltype(code), To>>(static_cast<const uint8_t*>(from), first, count, scale, to);
  };
  switch (static_cast<int>(type)) {
    case abi::CUDA_R_8F_E4M3:
      return run(OfFormat<E4m3>());
    case abi::CUDA_R_8F_E5M2:
      return run(OfFormat<E5m2>());
    case abi::CUDA_R_4F_E2M1:
      return run(OfFormat<E2m1>());
    case host_types::kE3M4:
      return run(OfFormat<E3m4>());
    case host_types::kE4M3Ieee:
      return run(OfFormat<E4m3Ieee>());
    case host_types::kE4M3B11Fnuz:
      return run(OfFormat<Fnuz<3, 11>>());
    case host_types::kE4M3Fnuz:
      return run(OfFormat<Fnuz<3, 8>>());
    case host_types::kE5M2Fnuz:
      return run(OfFormat<Fnuz<2, 16>>());
    case host_types::kE8M0:
      return run(Exponent());
    case host_types::kS4:
      return run(Signed<4>());
    case host_types::kU4:
      return run(Unsigned<4>());
    case abi::CUDA_R_8U:
      return run(Unsigned<8>());
    default:
      return run(Signed<8>());
  }
}

template <typename Format>
JAXMP_INLINE void EncodeBytes(const float* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(EncodeOne<Format>(from[i]));
}
JAXMP_DISPATCH(EncodeE4m3, (const float* from, int64_t count, uint8_t* to), (from, count, to),
               EncodeBytes<E4m3>(from, count, to))
JAXMP_DISPATCH(EncodeE5m2, (const float* from, int64_t count, uint8_t* to), (from, count, to),
               EncodeBytes<E5m2>(from, count, to))

}  // namespace

void Decode(cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, BFloat16* to) {
  DecodeInto(type, from, first, count, scale, &to->bits);
}
void Decode(cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, float* to) {
  DecodeInto(type, from, first, count, scale, to);
}

void Unpack(cudaDataType_t type, const void* from, int64_t first, int64_t count, int8_t* to) {
  const auto unpack =
      type == host_types::kS4 ? DecodeBest<Decoder<Signed<4>, int8_t>> : DecodeBest<Decoder<Unsigned<4>, int8_t>>;
  unpack(static_cast<const uint8_t*>(from), first, count, 1.0f, to);
}

void Encode(cudaDataType_t type, const float* from, int64_t count, void* to) {
  uint8_t* const bytes = static_cast<uint8_t*>(to);
  if (type == abi::CUDA_R_8F_E4M3) return EncodeE4m3Best(from, count, bytes);
  if (type == abi::CUDA_R_8F_E5M2) return EncodeE5m2Best(from, count, bytes);
  for (int64_t i = 0; i < count / 2; ++i) {
    bytes[i] = static_cast<uint8_t>(EncodeOne<E2m1>(from[2 * i]) | EncodeOne<E2m1>(from[2 * i + 1]) << 4);
  }
}

float Largest(cudaDataType_t type) {
  return type == abi::CUDA_R_8F_E4M3 ? 448.0f : type == abi::CUDA_R_8F_E5M2 ? 57344.0f : 6.0f;
}

float Ue4m3(uint8_t bits) { return DecodeOne<E4m3>(bits & 0x7fu); }

uint8_t Ue8m0Above(float scale) {
  const uint32_t bits = BitsOf(scale), exponent = bits >> 23 & 0xff, mantissa = bits & 0x7fffff;
  const bool rounds_up = exponent == 0 ? mantissa > 0x400000 : mantissa > 0 && exponent < 254;
  return static_cast<uint8_t>(exponent + (rounds_up ? 1 : 0));
}

}  // namespace jaxmp::hostmp
