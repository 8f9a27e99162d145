// Activations of epilogs, and their slopes.
#pragma once

#include <cstdint>

namespace jaxmp::hostmp {

// Gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), in place.
void Gelu(float* values, int64_t count);
void Gelu(double* values, int64_t count);

// gelu'(x), in place.
void GeluSlope(float* values, int64_t count);
void GeluSlope(double* values, int64_t count);

}  // namespace jaxmp::hostmp
