// A rectangle of local memory, column-major.
#ifndef JAXMP_HOSTMP_HANDLES_MATRIX_VIEW_H_
#define JAXMP_HOSTMP_HANDLES_MATRIX_VIEW_H_

#include <cstdint>
#include <cstring>

#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

struct MatrixView {
  char* data;
  int64_t ld;  // elements
};

inline MatrixView Locate(const Operand& x, int64_t row, int64_t col) {
  const int64_t ld = x.desc.lld;
  return {const_cast<char*>(x.data) + BytesOf(x.desc.type, col * ld + row), ld};
}

inline void CopyView(abi::cudaDataType_t type, const MatrixView& from, int64_t rows, int64_t cols,
                     const MatrixView& to) {
  for (int64_t col = 0; col < cols; ++col) {
    std::memcpy(to.data + BytesOf(type, col * to.ld), from.data + BytesOf(type, col * from.ld),
                static_cast<size_t>(BytesOf(type, rows)));
  }
}

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_HANDLES_MATRIX_VIEW_H_
