// How large matrices may be. What is beyond is garbage: no memory holds it. Below, neither a product of an extent or a
// block with a number of devices, nor a number of bytes, nor a sum of a few of them exceeds 64 bits.
#pragma once

#include <cstdint>

namespace jaxmp {

constexpr int64_t kLargestExtent = int64_t{1} << 40;    // and the largest block
constexpr int64_t kMostElements = int64_t{1} << 44;     // on a device
constexpr int64_t kMostAuxElements = int64_t{1} << 52;  // their columns may have padding

// True if rows x cols is at most `most`; neither is negative.
constexpr bool Fits(int64_t rows, int64_t cols, int64_t most) { return rows == 0 || cols <= most / rows; }

}  // namespace jaxmp
