// The tile registers of Intel's matrix unit: 16 lines of 64 bytes in a register.
#pragma once

#include <cstdint>

#include "csrc/hostmp/cpu/avx512.h"

#if defined(__x86_64__)

namespace jaxmp::hostmp {

#define JAXMP_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_line[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Configures the registers while it lives. The configuration is static, because GCC 12's _tile_loadconfig tells the
// compiler only of its first eight bytes, and stores to the rest of a local one could be left out.
class ScopedTiles {
 public:
  JAXMP_AMX ScopedTiles() {
    static constexpr TileConfig kConfig;
    _tile_loadconfig(&kConfig);
  }
  JAXMP_AMX ~ScopedTiles() { _tile_release(); }
  ScopedTiles(const ScopedTiles&) = delete;
  ScopedTiles& operator=(const ScopedTiles&) = delete;
};

}  // namespace jaxmp::hostmp

#endif
