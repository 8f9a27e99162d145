// The interface between the fake driver and a kernel that xla_gpu/bin/ptxas has translated, and the arithmetic of PTX.
#ifndef JAXMP_TESTS_FAKES_KERNEL_H_
#define JAXMP_TESTS_FAKES_KERNEL_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace fakes {

enum class Wait { kNothing, kBarrier, kWarp, kEnd };

// A thread runs until it waits, and goes on from there. All registers have 64 bits.
struct Thread {
  unsigned x = 0;
  size_t at = 0;
  Wait waits = Wait::kNothing;
  uint64_t value = 0;  // to the warp, and then from it
  int lane = 0;        // the lane that it wants the value of, or kSum
  std::vector<uint64_t> registers;
};
constexpr int kWarp = 32, kSum = -1;

struct Kernel {
  Wait (*run)(Thread& thread, const char* parameters, unsigned block, char* shared);
  size_t registers, shared_bytes;
  std::vector<size_t> parameters;  // bytes of each; they start at multiples of 16
};

// A variable of a module.
struct Global {
  void* data;
  size_t bytes;
};

#if defined(__aarch64__)
using Half = __fp16;  // GCC has _Float16 in C++ for this processor from 13 on
#else
using Half = _Float16;
#endif

struct BFloat {
  BFloat() = default;
  BFloat(float value) {  // rounds to the nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof(wide));
    bits = std::isnan(value) ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  uint16_t bits;
};

template <typename T>
T As(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
// Keeps the sign of signed integers.
template <typename T>
uint64_t Bits(T value) {
  if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) return static_cast<uint64_t>(int64_t{value});
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
double Saturated(T x) {
  return std::fmin(std::fmax(double(x), 0.0), 1.0);  // 0 for NaN
}
template <typename T>
T Fma(T x, T y, T z) {
  return sizeof(T) == 4 ? T(std::fmaf(x, y, z)) : T(std::fma(double(x), double(y), double(z)));
}
template <typename T>
T Shift(T x, uint32_t by, bool is_left) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (by >= kBits) return T(!is_left && x < 0 ? -1 : 0);
  return is_left ? T(uint64_t(x) << by) : T(x >> by);
}
// Returns the lane that a shuffle of the thread asks for, or its own lane if that is outside of the thread's segment.
inline int LaneOf(unsigned x, uint64_t wanted, uint64_t mask) {
  const unsigned lane = x % kWarp, segment = mask >> 8 & 31, last = (lane & segment) | (mask & 31 & ~segment);
  return static_cast<int>(wanted <= last ? static_cast<unsigned>(wanted) : lane);
}

// Stores and loads element by element, and moves on.
template <typename T>
void Store(T value, char** at) {
  std::memcpy(*at, &value, sizeof(T));
  *at += sizeof(T);
}
template <typename T>
uint64_t Load(char** at) {
  T value;
  std::memcpy(&value, *at, sizeof(T));
  *at += sizeof(T);
  return Bits(value);
}

}  // namespace fakes

#endif  // JAXMP_TESTS_FAKES_KERNEL_H_
