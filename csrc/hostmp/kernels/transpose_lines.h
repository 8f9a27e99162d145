// Turns four lines of numbers into columns, for packing with any instruction set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxmp::hostmp {

// to[k * step + line] = from[line][k], for 4 lines of numbers of 4 or 8 bytes. Inlined into the functions of each
// instruction set.
template <typename T>
inline __attribute__((always_inline)) void TransposeLines(const T* const* from, int64_t length, int64_t step, T* to) {
  int64_t k = 0;
#if defined(__x86_64__)
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; k + 4 <= length; k += 4) {
      __m128 r[4];
      for (int i = 0; i < 4; ++i) r[i] = _mm_loadu_ps(reinterpret_cast<const float*>(from[i] + k));
      _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
      for (int i = 0; i < 4; ++i) _mm_storeu_ps(reinterpret_cast<float*>(to + (k + i) * step), r[i]);
    }
  } else {
    for (; k + 2 <= length; k += 2) {
      for (int i = 0; i < 4; i += 2) {
        const __m128d x = _mm_loadu_pd(from[i] + k), y = _mm_loadu_pd(from[i + 1] + k);
        _mm_storeu_pd(to + k * step + i, _mm_unpacklo_pd(x, y));
        _mm_storeu_pd(to + (k + 1) * step + i, _mm_unpackhi_pd(x, y));
      }
    }
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; k + 4 <= length; k += 4) {
      float32x4_t r[4];
      for (int i = 0; i < 4; ++i) r[i] = vld1q_f32(reinterpret_cast<const float*>(from[i] + k));
      const float32x4_t even[2] = {vzip1q_f32(r[0], r[2]), vzip2q_f32(r[0], r[2])};
      const float32x4_t odd[2] = {vzip1q_f32(r[1], r[3]), vzip2q_f32(r[1], r[3])};
      for (int i = 0; i < 2; ++i) {
        auto* const line = reinterpret_cast<float*>(to + (k + 2 * i) * step);
        vst1q_f32(line, vzip1q_f32(even[i], odd[i]));
        vst1q_f32(line + step, vzip2q_f32(even[i], odd[i]));
      }
    }
  } else {
    for (; k + 2 <= length; k += 2) {
      for (int i = 0; i < 4; i += 2) {
        const float64x2_t x = vld1q_f64(from[i] + k), y = vld1q_f64(from[i + 1] + k);
        vst1q_f64(to + k * step + i, vzip1q_f64(x, y));
        vst1q_f64(to + (k + 1) * step + i, vzip2q_f64(x, y));
      }
    }
  }
#endif
  for (; k < length; ++k) {
    for (int i = 0; i < 4; ++i) to[k * step + i] = from[i][k];
  }
}

}  // namespace jaxmp::hostmp
