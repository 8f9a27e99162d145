#include "csrc/hostmp/numeric/low_precision.h"

#include <type_traits>

#include "csrc/hostmp/cpu/dispatch.h"
#include "csrc/hostmp/numeric/float8.h"

namespace jaxmp::hostmp {
namespace {

using abi::cudaDataType_t;

// A format with `kMantissa` stored bits and exponent bias `kBias`; `kMagnitude` masks all bits but the sign. If the
// format has them, magnitudes from `kNan` on are NaN, and `kInfinity` is infinite.
template <uint32_t Mantissa, uint32_t Bias, uint32_t Infinity, uint32_t Nan, uint32_t Largest,
          uint32_t Magnitude = 0x7f>
struct FloatFormat {
  static constexpr uint32_t kMantissa = Mantissa, kBias = Bias, kInfinity = Infinity, kNan = Nan, kLargest = Largest;
  static constexpr uint32_t kMagnitude = Magnitude, kSign = Magnitude + 1;
  static constexpr bool kIsFnuz = false;  // true if the code of -0 is a NaN
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

// Decodes without subnormal floats on the way, because threads of XLA flush them to zero.
template <typename Format>
JAXMP_INLINE float DecodeOne(uint32_t bits) {
  const uint32_t magnitude = bits & Format::kMagnitude;
  const uint32_t normal = (magnitude << (23 - Format::kMantissa)) + ((127 - Format::kBias) << 23);
  // With exponent 0 there is no leading bit: 2 (1 + f) 2^-bias - 2^(1 - bias) = f 2^(1 - bias).
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
  // Adding 2^23 times the spacing of the subnormal numbers leaves the rounded multiple of it in the low bits.
  constexpr uint32_t kUnit = (128 - Format::kBias + 23 - Format::kMantissa) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kUnit)) - kUnit;
  const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
  const uint32_t normal = (rounded >> kShift) - ((127 - Format::kBias) << Format::kMantissa);
  uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
  // Compared before rounding, so that the rounding of a huge number cannot wrap around.
  constexpr uint32_t kLimit = (Format::kLargest << kShift) + ((127 - Format::kBias) << 23);
  code = magnitude > kLimit ? Format::kLargest : code;
  constexpr uint32_t kNan = Format::kNan <= Format::kMagnitude ? Format::kMagnitude : Format::kLargest;
  code = magnitude > 0x7f800000u ? kNan : code;
  return code | sign;
}

// The meaning of a code of kBits bits.
template <typename Format>
struct OfFormat {
  static constexpr int kBits = Format::kSign == 0x8 ? 4 : 8;
  static JAXMP_INLINE float Value(uint32_t code) { return DecodeOne<Format>(code); }
};
template <int Bits>
struct Unsigned {
  static constexpr int kBits = Bits;
  static JAXMP_INLINE float Value(uint32_t code) { return static_cast<float>(static_cast<int>(code)); }
};
template <int Bits>
struct Signed {
  static constexpr int kBits = Bits, kSign = 1 << (Bits - 1);
  static JAXMP_INLINE float Value(uint32_t code) {
    return static_cast<float>((static_cast<int>(code) ^ kSign) - kSign);
  }
};
struct Exponent {
  static constexpr int kBits = 8;
  static JAXMP_INLINE float Value(uint32_t code) { return Ue8m0(static_cast<uint8_t>(code)); }
};

template <typename Code, typename To>
JAXMP_INLINE void Put(uint32_t code, float scale, To* to) {
  if constexpr (std::is_same_v<To, float>) {
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

#if defined(__x86_64__)
// The same by float8.h, for a whole number of vectors.
template <typename Float8, typename To>
JAXMP_AVX2 void DecodeVectors(const Float8* from, int64_t count, float scale, To* to) {
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 values = _mm256_mul_ps(Widen8(from + i), _mm256_set1_ps(scale));
    if constexpr (std::is_same_v<To, float>) {
      _mm256_storeu_ps(to + i, values);
    } else {
      const __m256i bits = _mm256_srli_epi32(_mm256_castps_si256(values), 16);
      const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packus_epi32(low, high));
    }
  }
}

// Looks up the numbers of as many bytes as fill vectors, and returns how many bytes.
JAXMP_AVX2 int64_t LookUp(const uint8_t* bytes, int64_t count, const int8_t* numbers, int8_t* to) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)), low_half = _mm_set1_epi8(0xf);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
    const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(codes, low_half));
    const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(codes, 4), low_half));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i + 16), _mm_unpackhi_epi8(low, high));
  }
  return i;
}
#endif

// Code and To are one parameter, because a macro's argument has no comma.
template <typename CodeType, typename ToType>
struct Decoder {
  using Code = CodeType;
  using To = ToType;
};
JAXMP_DISPATCH_TEMPLATE(template <typename D>, Decode,
                        (const uint8_t* from, int64_t first, int64_t count, float scale, typename D::To* to),
                        <D>(from, first, count, scale, to),
                        (DecodeRun<typename D::Code, typename D::To>(from, first, count, scale, to)))

template <typename Float8, typename Format, typename To>
void DecodeFloat8(const uint8_t* from, int64_t count, float scale, To* to) {
  int64_t done = 0;
#if defined(__x86_64__)
  if (cpu().avx2) {
    done = count / 8 * 8;
    DecodeVectors(reinterpret_cast<const Float8*>(from), done, scale, to);
  }
#endif
  DecodeBest<Decoder<OfFormat<Format>, To>>(from, done, count - done, scale, to + done);
}

template <typename To>
void DecodeInto(cudaDataType_t type, const void* from, int64_t first, int64_t count, float scale, To* to) {
  const auto run = [&](auto code) {
    DecodeBest<Decoder<decltype(code), To>>(static_cast<const uint8_t*>(from), first, count, scale, to);
  };
  switch (static_cast<int>(type)) {
    case abi::CUDA_R_8F_E4M3:
      return DecodeFloat8<Float8E4m3, E4m3>(static_cast<const uint8_t*>(from) + first, count, scale, to);
    case abi::CUDA_R_8F_E5M2:
      return DecodeFloat8<Float8E5m2, E5m2>(static_cast<const uint8_t*>(from) + first, count, scale, to);
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

void Widen(const Float8E4m3* from, float* to, int64_t count) {
  DecodeInto(abi::CUDA_R_8F_E4M3, from, 0, count, 1.0f, to);
}
void Widen(const Float8E5m2* from, float* to, int64_t count) {
  DecodeInto(abi::CUDA_R_8F_E5M2, from, 0, count, 1.0f, to);
}

void Unpack(cudaDataType_t type, const void* from, int64_t first, int64_t count, int8_t* to) {
  static constexpr int8_t kS4[] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1},
                          kU4[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                          kTwiceE2m1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const int8_t* const numbers = type == host_types::kS4 ? kS4 : type == host_types::kU4 ? kU4 : kTwiceE2m1;
  const uint8_t* bytes = static_cast<const uint8_t*>(from) + first / 2;
  if (first % 2 != 0 && count > 0) {
    *to++ = numbers[*bytes++ >> 4];
    --count;
  }
  int64_t i = 0;
#if defined(__x86_64__)
  if (cpu().avx2) i = LookUp(bytes, count / 2, numbers, to);
#endif
  for (; i < count / 2; ++i) {
    to[2 * i] = numbers[bytes[i] & 0xfu];
    to[2 * i + 1] = numbers[bytes[i] >> 4];
  }
  if (count % 2 != 0) to[count - 1] = numbers[bytes[count / 2] & 0xfu];
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
