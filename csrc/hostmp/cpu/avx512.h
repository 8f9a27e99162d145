// The vector instructions of x86 as functions, for kernels that are picked at run time.
#pragma once

#define JAXMP_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

#if defined(__x86_64__)

// GCC 12 warns about the "undefined" values of its own AVX-512 header where they are inlined (GCC bug 105593), so the
// warning is off to the end of the file that includes this one.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#endif
