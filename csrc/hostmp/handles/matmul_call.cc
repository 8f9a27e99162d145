#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// Complex products are left out because the kernels add the two products of an imaginary part in their own order. Types
// of 8 bits and fewer are left out because rows and columns may have different scales and D may be narrow.
bool MatmulCall::may_be_symmetric() const {
  const abi::cublasMpMatrixDescriptor &x = a.desc, &y = b.desc;
  const bool is_alike = x.type == y.type && AreAlike(x.rows, y.rows) && AreAlike(x.cols, y.cols) &&
                        x.grid.layout == y.grid.layout && a.row == b.row && a.col == b.col;
  const bool is_wide_and_real = !Facts(x.type).is_complex && !Facts(x.type).is_low_precision;
  return is_alike && is_wide_and_real && m == n && is_a_plain() != is_b_plain() && !has_c;
}

}  // namespace jaxmp::hostmp
