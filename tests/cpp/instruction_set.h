// JAXMP_ISA for the C++ tests: one machine tests every instruction set that its processor has.
#ifndef JAXMP_TESTS_INSTRUCTION_SET_H_
#define JAXMP_TESTS_INSTRUCTION_SET_H_

#include <cstdio>
#include <cstdlib>

#include "csrc/hostmp/cpu/features.h"

namespace jaxmp::tests {

// Ends the program as skipped where the processor lacks what is asked for.
inline void LimitInstructionSet() {
  const char* const name = std::getenv("JAXMP_ISA");
  const Status status = hostmp::LimitInstructionSet(name ? name : hostmp::instruction_set());
  if (!status.ok()) {
    std::printf("SKIPPED: %s\n", status.message().c_str());
    std::exit(77);
  }
  std::printf("instruction set: %s\n", hostmp::instruction_set().c_str());
}

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_INSTRUCTION_SET_H_
