// The compiler's own type of half precision, with IEEE 754's format and rounding.
#ifndef JAXMP_TESTS_FAKES_HALF_H_
#define JAXMP_TESTS_FAKES_HALF_H_

namespace fakes {

#if defined(__aarch64__)
using Half = __fp16;  // GCC has _Float16 in C++ for this processor from 13 on
#else
using Half = _Float16;
#endif

}  // namespace fakes

#endif  // JAXMP_TESTS_FAKES_HALF_H_
