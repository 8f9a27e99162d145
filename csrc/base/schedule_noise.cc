#include "csrc/base/schedule_noise.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace jaxmp {
namespace {

std::atomic<uint32_t> most_microseconds{0}, state{1};

}  // namespace

void SetScheduleNoise(uint32_t seed, uint32_t microseconds) {
  state = seed;
  most_microseconds = microseconds;
}

void AddScheduleNoise() {
  const uint32_t most = most_microseconds.load(std::memory_order_relaxed);
  if (most == 0) return;
  const uint32_t drawn = state.fetch_add(0x9E3779B9u, std::memory_order_relaxed) * 0x85EBCA6Bu >> 8;
  if (drawn % 2) std::this_thread::sleep_for(std::chrono::microseconds(drawn / 2 % most));
}

}  // namespace jaxmp
