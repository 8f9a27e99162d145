// The instructions and processors that this process may use.
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace jaxmp::hostmp {

struct Cpu {
  bool avx2 = false;         // with fma and f16c
  bool avx512 = false;       // f, bw, vl, dq
  bool avx512_vnni = false;  // with avx512
  bool avx512_bf16 = false;  // with avx512_vnni
  bool amx = false;          // bf16 and int8, with avx512_bf16; the system lets this process use the tile registers
  bool avx_vnni = false;     // with avx2, of 256 bits
  bool neon = false;         // on every aarch64
  bool neon_dotprod = false;
};

// The instruction sets that our kernels use: the fastest of this processor, or what LimitInstructionSet() leaves.
const Cpu& cpu();

// The highest of our instruction sets that cpu() has: "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni",
// "avx2", "neon_dotprod", "neon" or "portable" (plain code, as compiled for the architecture).
std::string instruction_set();

// Limits cpu() to the named instruction set and the sets below it; an error if this processor does not have it. Called
// before the first product, because cpu() picks every kernel of ours. A BLAS detects the processor itself.
Status LimitInstructionSet(const std::string& name);

// The processors that this process may use, asked once, on the first call.
const std::vector<int>& processors();

// Returns the index in processors() of the one that runs the calling thread; -1 if it is none of them.
int current_processor();

// The number of threads that a product is cut for: one for each of processors(). It is fixed for the life of the
// process, so that the cut, and with it every bit of a result, does not depend on which threads are free.
int machine_threads();

}  // namespace jaxmp::hostmp
