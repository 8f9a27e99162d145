#include "csrc/hostmp/cpu/features.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace jaxmp::hostmp {
namespace {

#if defined(__x86_64__)
bool Bit(unsigned value, int number) { return (value >> number) & 1; }

// Linux gives the tile registers' 8 KiB only to processes that ask (Documentation/arch/x86/xstate.rst).
bool MayUseTiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Cpu Detect() {
  Cpu found;
  // The compiler's test includes whether the system saves the AVX and AVX-512 registers on a context switch.
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  found.avx512 = found.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) found.avx2 = found.avx2 && Bit(c, 29);  // f16c
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    found.avx512_vnni = found.avx512 && Bit(c, 11);
    found.amx = Bit(d, 22) && Bit(d, 24) && Bit(d, 25) && found.avx512_vnni && MayUseTiles();
  }
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avx512_bf16 = found.avx512_vnni && Bit(a, 5);
    found.avx_vnni = found.avx2 && Bit(a, 4);
  }
  return found;
}
#elif defined(__aarch64__)
Cpu Detect() {
  Cpu found;
  found.neon = true;  // part of the architecture
  found.neon_dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  return found;
}
#else
Cpu Detect() { return {}; }
#endif

const Cpu& detected() {
  static const Cpu found = Detect();
  return found;
}

// The fastest instructions. Intel's VDPBF16PS has half the rate of multiplication and addition in f32, so widening bf16
// to f32 is faster (benchmarks/bench_matmul.py, compared with JAXMP_ISA=avx512_bf16).
Cpu Choose() {
  Cpu chosen = detected();
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel") && !chosen.amx) chosen.avx512_bf16 = false;
#endif
  return chosen;
}

Cpu& chosen() {
  static Cpu found = Choose();
  return found;
}

struct InstructionSet {
  const char* name;
  bool Cpu::* feature;
};

// From the most capable one down; an x86 set includes the sets below it, except avx_vnni.
constexpr InstructionSet kInstructionSets[] = {{"amx", &Cpu::amx},
                                               {"avx512_bf16", &Cpu::avx512_bf16},
                                               {"avx512_vnni", &Cpu::avx512_vnni},
                                               {"avx512", &Cpu::avx512},
                                               {"avx_vnni", &Cpu::avx_vnni},
                                               {"avx2", &Cpu::avx2},
                                               {"neon_dotprod", &Cpu::neon_dotprod},
                                               {"neon", &Cpu::neon}};
constexpr char kPortable[] = "portable";

std::string HighestOf(const Cpu& processor) {
  for (const InstructionSet& set : kInstructionSets) {
    if (processor.*set.feature) return set.name;
  }
  return kPortable;
}

std::vector<int> FindProcessors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool is_known = sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0;
  const int count = is_known ? CPU_SETSIZE : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<int> found;
  for (int i = 0; i < count; ++i) {
    if (!is_known || CPU_ISSET(static_cast<size_t>(i), &set)) found.push_back(i);
  }
  return found;
}

}  // namespace

const Cpu& cpu() { return chosen(); }

std::string instruction_set() { return HighestOf(cpu()); }

Status LimitInstructionSet(const std::string& name) {
  Cpu lower = detected();
  for (const InstructionSet& set : kInstructionSets) {
    if (name == set.name && lower.*set.feature) {
      chosen() = lower;
      return {};
    }
    lower.*set.feature = false;
  }
  if (name != kPortable) {
    return InvalidArgument("this processor has no \"", name, "\"; the most that it has is \"", HighestOf(detected()),
                           "\", the least is \"", kPortable, "\"");
  }
  chosen() = lower;
  return {};
}

const std::vector<int>& processors() {
  static const auto* const found = new std::vector<int>(FindProcessors());  // threads outlive main
  return *found;
}

int current_processor() {
  const auto found = std::find(processors().begin(), processors().end(), sched_getcpu());
  return found == processors().end() ? -1 : static_cast<int>(found - processors().begin());
}

int machine_threads() { return static_cast<int>(processors().size()); }

}  // namespace jaxmp::hostmp
