// Loops over contiguous numbers, each compiled for several instruction sets and picked once at run time. Every
// variant rounds in the same places, so that they agree to the bit.
#ifndef JAXMP_HOSTMP_ELEMENTWISE_H_
#define JAXMP_HOSTMP_ELEMENTWISE_H_

#include <cstdint>

#include "csrc/hostmp/types.h"

namespace jaxmp::hostmp {

void widen(const BFloat16* from, float* to, int64_t count);
void widen(const Float16* from, float* to, int64_t count);

// To nearest, ties to even; a NaN stays one.
void narrow(const float* from, BFloat16* to, int64_t count);
void narrow(const float* from, Float16* to, int64_t count);

// gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), in place.
void gelu(float* values, int64_t count);
void gelu(double* values, int64_t count);

// gelu'(x), in place.
void gelu_slope(float* values, int64_t count);
void gelu_slope(double* values, int64_t count);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_ELEMENTWISE_H_
