// How a thread's processor computes: its rounding mode, and whether subnormal numbers count as zero.
//
// XLA:CPU computes with subnormal numbers as zero, in arguments and results, on every thread of its own; a new thread
// keeps them. So a thread of ours on which a program resumes, or tiles are computed, takes the state of the thread that
// came to our call: the bits of a result must not depend on which rank has waited.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxmp {

class FloatState {
 public:
  // This thread's.
  static FloatState Current() { return FloatState(Read() & kControls); }

  // The same, with subnormal numbers as zero, in arguments and results.
  FloatState Flushing() const { return FloatState(bits_ | kFlush); }

  void Apply() const { Write((Read() & ~kControls) | bits_); }

  bool operator==(const FloatState& other) const { return bits_ == other.bits_; }
  bool operator!=(const FloatState& other) const { return !(*this == other); }

 private:
#if defined(__x86_64__)
  // MXCSR (Intel SDM, volume 1, 10.2.3): all but the six flags of exceptions that have happened.
  static constexpr uint64_t kControls = 0xffc0, kFlush = 0x8040;  // FTZ and DAZ
  static uint64_t Read() { return _mm_getcsr(); }
  static void Write(uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  // FPCR (Arm ARM, C5.2.8) has no flags. FZ flushes arguments and results, FZ16 does so for half precision.
  static constexpr uint64_t kControls = ~uint64_t{0}, kFlush = uint64_t{1} << 24 | uint64_t{1} << 19;
  static uint64_t Read() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void Write(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits) : "memory"); }
#else
  static constexpr uint64_t kControls = 0, kFlush = 0;
  static uint64_t Read() { return 0; }
  static void Write(uint64_t) {}
#endif

  explicit FloatState(uint64_t bits) : bits_(bits) {}

  uint64_t bits_;
};

// This thread computes in the given state while it lives.
class ScopedFloatState {
 public:
  explicit ScopedFloatState(const FloatState& state) : before_(FloatState::Current()) { state.Apply(); }
  ~ScopedFloatState() { before_.Apply(); }
  ScopedFloatState(const ScopedFloatState&) = delete;
  ScopedFloatState& operator=(const ScopedFloatState&) = delete;

 private:
  const FloatState before_;
};

}  // namespace jaxmp
