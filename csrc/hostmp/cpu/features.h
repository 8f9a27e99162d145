// What this processor, and the system's kernel, let us use. Asked once.
#ifndef JAXMP_HOSTMP_CPU_FEATURES_H_
#define JAXMP_HOSTMP_CPU_FEATURES_H_

namespace jaxmp::hostmp {

struct Cpu {
  bool avx2 = false;         // with fma and f16c
  bool avx512 = false;       // f, bw, vl, dq
  bool avx512_bf16 = false;  // with avx512
  bool amx_bf16 = false;     // with avx512; the system lets this process use the tile registers
  bool amx_fp16 = false;
};

const Cpu& cpu();

// The number of threads that a product is cut for: the processors that this process may use, fixed
// for its life, so that the cut, and with it every bit of a result, does not depend on who happens
// to be free.
int machine_threads();

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_CPU_FEATURES_H_
