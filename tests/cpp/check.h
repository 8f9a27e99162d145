// Tests of C++ and their checks. `cpp_tests NAME` runs the tests in tests/cpp/NAME.cc, in the order of that file.
// It includes what most of them use of the standard library.
#ifndef JAXMP_TESTS_CHECK_H_
#define JAXMP_TESTS_CHECK_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/cblas.h"

namespace jaxmp::check {

// The thread sanitizer is some fifty times slower, and its findings do not depend on the case: tests that spend most
// time in their own reference then take fewer cases.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderThreadSanitizer = true;
#else
inline constexpr bool kUnderThreadSanitizer = false;
#endif
// The address and undefined-behaviour sanitizers take some ten times as long, as does the emulation of a processor.
#if defined(__SANITIZE_ADDRESS__) || defined(JAXMP_EMULATED)
inline constexpr bool kIsSlow = true;
#else
inline constexpr bool kIsSlow = kUnderThreadSanitizer;
#endif

inline std::atomic<int> failures{0};

inline void report(bool holds, const char* file, int line, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << expression << ": " << a << " != " << b;
  report(false, file, line, what.str());
}

// The text must be in the message: an error without it would send its reader elsewhere.
inline void contains(const std::string& message, const std::string& part, const char* file, int line) {
  report(message.find(part) != std::string::npos, file, line, "no \"" + part + "\" in: " + message);
}

struct Test {
  Test(const char* file, const char* name, void (*run)()) : file(file), name(name), run(run) { all().push_back(*this); }
  static std::vector<Test>& all() {
    static std::vector<Test> tests;
    return tests;
  }
  const char *file, *name;
  void (*run)();
};

inline int summary(const char* name) {
  std::printf("%s: %d failed\n", name, failures.load());
  return failures.load() == 0 ? 0 : 1;
}

[[noreturn]] inline void skip(const std::string& why) {
  std::printf("SKIPPED: %s\n", why.c_str());
  std::exit(77);
}

// A variable that the environment must have.
inline const char* environment(const char* name) {
  const char* value = std::getenv(name);
  if (!value) {
    std::fprintf(stderr, "set %s\n", name);
    std::exit(2);
  }
  return value;
}

inline void load_blas() {
  const Status status = hostmp::LoadBlas(environment("JAXMP_BLAS"));
  report(status.ok(), __FILE__, __LINE__, status.message());
}

// Limits kernels to the set that JAXMP_ISA names: one machine tests every instruction set that its processor has.
inline void limit_instruction_set() {
  const char* const name = std::getenv("JAXMP_ISA");
  if (!name) return;
  const Status status = hostmp::LimitInstructionSet(name);
  if (!status.ok()) skip(status.message());
  std::printf("instruction set: %s\n", hostmp::instruction_set().c_str());
}

}  // namespace jaxmp::check

#define TEST(name)                                                      \
  void name();                                                          \
  const jaxmp::check::Test name##_is_a_test = {__FILE__, #name, &name}; \
  void name()
#define CHECK(condition) jaxmp::check::report(condition, __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) jaxmp::check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
#define CHECK_CONTAINS(message, part) jaxmp::check::contains(message, part, __FILE__, __LINE__)

#endif  // JAXMP_TESTS_CHECK_H_
