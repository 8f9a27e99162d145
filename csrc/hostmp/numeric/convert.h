// Loops over contiguous numbers, compiled for several instruction sets and picked at run time. Every variant rounds in
// the same places, so that all agree to the bit.
#pragma once

#include <cstdint>

#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {

void Widen(const BFloat16* from, float* to, int64_t count);
void Widen(const Float16* from, float* to, int64_t count);
inline void Widen(const int8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
inline void Widen(const uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// Rounds to nearest, ties to even; a NaN stays a NaN.
void Downconvert(const float* from, BFloat16* to, int64_t count);
void Downconvert(const float* from, Float16* to, int64_t count);

}  // namespace jaxmp::hostmp
