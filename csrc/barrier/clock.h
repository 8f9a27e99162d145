#pragma once

#include <chrono>

namespace jaxmp::barrier {

// The time. A simulation sets another source.
struct Clock : std::chrono::steady_clock {
  static time_point now() { return source(); }
  static inline time_point (*source)() = &std::chrono::steady_clock::now;
};

inline double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace jaxmp::barrier
