// One call of Matmul with every argument open to change, and what it is answered.
#ifndef JAXMP_TESTS_HOSTMP_ARGUMENTS_H_
#define JAXMP_TESTS_HOSTMP_ARGUMENTS_H_

#include <string>
#include <vector>

#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {

inline const MpApi& api = host_api();

// A status with its reason, taken before a later call that succeeds clears it.
struct Outcome {
  Outcome(cublasMpStatus_t status) : status(status), message(api.last_error()) {}  // NOLINT: what REFUSED is given
  cublasMpStatus_t status;
  std::string message;
};

inline void refused(const Outcome& got, cublasMpStatus_t expected, const std::vector<std::string>& parts, int line) {
  check::equal<int, int>(got.status, expected, "status", __FILE__, line);
  for (const std::string& part : parts) check::contains(got.message, part, __FILE__, line);
}
#define REFUSED(call, status, ...) refused(call, CUBLASMP_STATUS_##status, {__VA_ARGS__}, __LINE__)

// Rank 0 of a world, with every argument of Matmul open to change.
struct Arguments {
  explicit Arguments(World& world, int rank = 0) : world(world), r(world.ranks[static_cast<size_t>(rank)]) {
    const Case& c = world.c;
    m = c.m, n = c.n, k = c.k;
    handle = r.handle.get(), matmul = r.matmul.get();
    desc_a = r.desc_a.get(), desc_b = r.desc_b.get(), desc_d = r.desc_d.get();
    alpha = r.alpha.data(), beta = r.beta.data();
    a = r.a->get(), b = r.b->get(), d = r.d->get();
    work = r.workspace->get(), bytes = r.workspace->size();
    stream = {&world.rendezvous, 1, 0, nullptr, [](void*, const Status&) {}, nullptr};
    check_ok(api.SetStream(handle, hostmp::AsStream(&stream)));
  }
  cublasMpStatus_t run() const {
    return api.Matmul(handle, matmul, m, n, k, alpha, a, ia, 1, desc_a, b, 1, jb, desc_b, beta, c, ic, 1, desc_c, d, 1,
                      1, desc_d, work, bytes, nullptr, 0);
  }
  cublasMpStatus_t query() const {
    size_t device = 0, host = 0;
    return api.Matmul_bufferSize(handle, matmul, m, n, k, alpha, a, ia, 1, desc_a, b, 1, jb, desc_b, beta, c, ic, 1,
                                 desc_c, d, 1, 1, desc_d, &device, &host);
  }
  template <typename T>
  void attribute(int number, T value) const {
    set(matmul, number, value);
  }

  World& world;
  Rank& r;
  hostmp::Stream stream;
  cublasMpHandle_t handle;
  cublasMpMatmulDescriptor_t matmul;
  int64_t m, n, k, ia = 1, jb = 1, ic = 1;
  const void *alpha, *beta, *a, *b, *c = nullptr;
  void *d, *work;
  size_t bytes;
  cublasMpMatrixDescriptor_t desc_a, desc_b, desc_c = nullptr, desc_d;
};

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_HOSTMP_ARGUMENTS_H_
