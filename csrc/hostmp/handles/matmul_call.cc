#include "csrc/hostmp/handles/matmul_call.h"

namespace jaxmp::hostmp {

// A complex product is left out: the kernels add the two products of an imaginary part in an order of their own.
bool MatmulCall::may_be_symmetric() const {
  const abi::cublasMpMatrixDescriptor &x = a.desc, &y = b.desc;
  const bool is_alike = x.type == y.type && AreAlike(x.rows, y.rows) && AreAlike(x.cols, y.cols) &&
                        x.grid.layout == y.grid.layout && a.row == b.row && a.col == b.col;
  return is_alike && m == n && is_a_plain() != is_b_plain() && !Facts(x.type).is_complex && !is_decoded() && !has_c;
}

}  // namespace jaxmp::hostmp
