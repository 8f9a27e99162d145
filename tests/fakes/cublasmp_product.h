// A product of the fake libcublasmp.so.0 on its stream.
#ifndef JAXMP_TESTS_FAKES_CUBLASMP_PRODUCT_H_
#define JAXMP_TESTS_FAKES_CUBLASMP_PRODUCT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tests/fakes/cublasmp_state.h"

#pragma GCC visibility push(hidden)

namespace fakes {

// A rank's arguments of a product, in memory that each process of the job reads.
struct Arguments {
  int64_t m, n, k;
  std::array<char, 16> alpha, beta;  // the plan's scalars have 16 bytes for any type
  const void *a, *b, *c;
  void *d, *work;
  int64_t ia, ja, ib, jb, ic, jc, id, jd;
  cublasMpMatrixDescriptor desc_a, desc_b, desc_c, desc_d;
  bool has_c, fixed_reduction_order;
  decltype(cublasMpMatmulDescriptor::values) values;
  decltype(cublasMpMatmulDescriptor::is_set) is_set;
  size_t bytes;
};
static_assert(std::is_trivially_copyable_v<Arguments>);

// It ends when every rank has come and rank 0 has computed all of it; with FAKE_CUBLASMP_SEED=n, as soon as the
// library's promises allow.
struct Product {
  Arguments* arguments;
  ncclComm_t comm;
  int ordinal;

  static void Run(void* data);  // on the stream
  void Count() const;

 private:
  void Compute() const;
  // Keeps only what is promised: the work of one rank is in the order of its stream. A rank puts its message in its
  // peers' workspaces as soon as it runs, or in its own, where they fetch it. It goes on when all have sent theirs.
  // Every step is late by a time that depends on the seed, the rank and the call.
  void Exchange() const;
};

}  // namespace fakes

#pragma GCC visibility pop

#endif  // JAXMP_TESTS_FAKES_CUBLASMP_PRODUCT_H_
