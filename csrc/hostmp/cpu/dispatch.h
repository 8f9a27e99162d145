// What functions share that are compiled for several instruction sets and picked once at run time.
#ifndef JAXMP_HOSTMP_CPU_DISPATCH_H_
#define JAXMP_HOSTMP_CPU_DISPATCH_H_

#include <cstdint>
#include <cstring>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::hostmp {

#define JAXMP_INLINE inline __attribute__((always_inline))

JAXMP_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
JAXMP_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Defines <name>_best: one function for each instruction set, all with the same body; behind `prefix`, "template <...>"
// or nothing.
#if defined(__x86_64__)
#define JAXMP_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define JAXMP_AVX2 __attribute__((target("avx2,fma,f16c")))
#define JAXMP_DISPATCH_TEMPLATE(prefix, name, parameters, arguments, body) \
  prefix JAXMP_AVX512 void name##_avx512 parameters { body; }              \
  prefix JAXMP_AVX2 void name##_avx2 parameters { body; }                  \
  prefix void name##_plain parameters { body; }                            \
  prefix void name##_best parameters {                                     \
    if (cpu().avx512) return name##_avx512 arguments;                      \
    if (cpu().avx2) return name##_avx2 arguments;                          \
    name##_plain arguments;                                                \
  }
#else
#define JAXMP_DISPATCH_TEMPLATE(prefix, name, parameters, arguments, body) \
  prefix void name##_best parameters { body; }
#endif
#define JAXMP_DISPATCH(name, parameters, arguments, body) JAXMP_DISPATCH_TEMPLATE(, name, parameters, arguments, body)

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_CPU_DISPATCH_H_
