// The inputs of a case and its expected results, from the definitions, over whole matrices.
#ifndef JAXMP_TESTS_CONFORMANCE_OPERANDS_H_
#define JAXMP_TESTS_CONFORMANCE_OPERANDS_H_

#include "tests/conformance/case.h"

namespace jaxmp::conformance {

// Small integers, with exact sums: equal on every rank, and in every process.
struct Operands {
  explicit Operands(const Case& c);

  Matrix a, b, c, aux;  // a and b as stored; aux is what a derivative reads (a mask says > 0)
  std::vector<Number> bias;
};

// A power of two for the block of elements around (inner, outer) of an operand: `inner` counts along k.
double scale_of(int mode, int64_t inner, int64_t outer, unsigned seed);
constexpr double kScaleC = 2, kScaleD = 0.5, kScaleAux = 0.25;
constexpr unsigned kSeedA = 2, kSeedB = 3;

// The elements of a block along k, and across it, that share a scale.
int64_t inner_block(int mode);
int64_t outer_block(int mode);

// Normally distributed numbers that the type has; one of 8 bits or fewer keeps its integers.
void fill_random(Matrix* matrix, cudaDataType_t type, unsigned seed);

struct Expected {
  Expected(const Case& c, const Operands& x);

  Matrix z;          // alpha op(A) op(B) + beta C + bias
  Matrix magnitude;  // the same of absolute values
  Matrix d;          // the epilog of z
  Matrix slack;      // the error that d may have in addition to its rounding, in units of the accumulator's
  std::vector<Number> gradient;
  std::vector<double> gradient_slack;  // as an absolute error
  bool is_exact;                       // whether d has one right answer to the bit
};

// The number that `value` becomes when it is stored.
Number stored(cudaDataType_t type, Number value);

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_OPERANDS_H_
