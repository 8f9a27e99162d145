// A tile of D from floats to 8 or 4 bits, with the scales of its blocks.
#ifndef JAXMP_HOSTMP_NUMERIC_DOWNCONVERT_H_
#define JAXMP_HOSTMP_NUMERIC_DOWNCONVERT_H_

#include <cstdint>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {

// What happens to a tile of D in floats on its way to 8 or 4 bits: `scale` times it, encoded. With a tiled `mode`,
// each block of a column is divided by a scale of its own, which goes to `scales`. `row` and `col` are the tile's place
// in the rank's part, which has `rows_of_part` rows. Returns the largest absolute value ahead of all scaling, as bits
// of a float (a NaN is larger than any number).
struct Downconversion {
  abi::cudaDataType_t type;
  const float* z;
  int64_t ldz, rows, cols;
  char* d;  // the tile's first element
  int64_t ldd;
  float scale;
  ScaleMode mode;
  uint8_t* scales;
  int64_t row, col, rows_of_part;
};
uint32_t DownconvertTile(const Downconversion& output);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_NUMERIC_DOWNCONVERT_H_
