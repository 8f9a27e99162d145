// Helpers of functions that are compiled for several instruction sets and picked at run time.
#pragma once

#include <cstdint>
#include <cstring>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {

#define JAXMP_INLINE inline __attribute__((always_inline))

JAXMP_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JAXMP_INLINE float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Defines <name>Best, which calls one of several functions with the same body, compiled for different instruction sets.
// `prefix` is "template <...>" or nothing.
#if defined(__x86_64__)
#define JAXMP_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define JAXMP_AVX2 __attribute__((target("avx2,fma,f16c")))
#define JAXMP_DISPATCH_TEMPLATE(prefix, name, parameters, arguments, body) \
  prefix JAXMP_AVX512 void name##Avx512 parameters { body; }               \
  prefix JAXMP_AVX2 void name##Avx2 parameters { body; }                   \
  prefix void name##Plain parameters { body; }                             \
  prefix void name##Best parameters {                                      \
    if (cpu().avx512) return name##Avx512 arguments;                       \
    if (cpu().avx2) return name##Avx2 arguments;                           \
    name##Plain arguments;                                                 \
  }
#else
#define JAXMP_DISPATCH_TEMPLATE(prefix, name, parameters, arguments, body) \
  prefix void name##Best parameters { body; }
#endif
#define JAXMP_DISPATCH(name, parameters, arguments, body) JAXMP_DISPATCH_TEMPLATE(, name, parameters, arguments, body)

}  // namespace jaxmp::hostmp
