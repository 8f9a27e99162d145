// Delays at random in the places where ranks meet, so that a test sees schedules that seldom happen by themselves.
#pragma once

#include <cstdint>

namespace jaxmp {

// From now on each thread that passes by waits up to so many microseconds, one time in two; 0: none waits.
void SetScheduleNoise(uint32_t seed, uint32_t microseconds);

// A place where a rank comes to others, or goes on after them.
void AddScheduleNoise();

}  // namespace jaxmp
