// The bias gradient of an epilog: the columns of a stored matrix, summed over all ranks.
#ifndef JAXMP_HOSTMP_GRADIENT_H_
#define JAXMP_HOSTMP_GRADIENT_H_

#include "csrc/hostmp/tile.h"

namespace jaxmp::hostmp {

// Sums the columns of D (as stored), A or B, as the epilog of the product says, and writes the sums of its rows to
// every rank. Runs once, when D is complete; does nothing for the other epilogs.
void sum_gradient(const Product2D& product);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_GRADIENT_H_
