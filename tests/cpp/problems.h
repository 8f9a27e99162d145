// Attributes of calls, as Python would pass them.
#ifndef JAXMP_TESTS_PROBLEMS_H_
#define JAXMP_TESTS_PROBLEMS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/plan/matmul_problem.h"

namespace jaxmp::tests {

inline Attributes With(Attributes attributes, const Attributes& changes) {
  for (const auto& [name, value] : changes) attributes[name] = value;
  return attributes;
}

inline Attributes Local(int64_t m, int64_t n, int64_t k) {
  const std::pair<const char*, std::vector<const char*>> words[] = {
      {"local", {"pattern"}},
      {"32F", {"compute"}},
      {"run_to_run", {"determinism"}},
      {"default", {"algorithm"}},
      {"N", {"trans_a", "trans_b"}},
      {"f32", {"dtype_a", "dtype_b", "dtype_d"}},
      {"none",
       {"dtype_c", "dtype_bias", "dtype_aux", "scale_mode_a", "scale_mode_b", "scale_mode_c", "scale_mode_d",
        "scale_mode_aux", "d_out_scale_mode", "communication_dtype"}}};
  Attributes call = {{"m", m}, {"n", n}, {"k", k}};
  for (const auto& [word, names] : words) {
    for (const char* name : names) call[name] = std::string(word);
  }
  for (const char* name : {"amax_d", "amax_aux", "epilog", "comm_sm_count"}) call[name] = int64_t{0};
  for (const char* name : {"mesh_shape", "axes_row", "axes_col", "layout_a", "layout_b", "layout_d", "devices"}) {
    call[name] = std::vector<int64_t>{};
  }
  return With(call, {{"alpha", std::vector<double>{1, 0}}, {"beta", std::vector<double>{0, 0}}});
}

inline Attributes OneAxis(const char* pattern, int64_t nranks, int64_t m, int64_t n, int64_t k) {
  Attributes attributes = Local(m, n, k);
  attributes["pattern"] = std::string(pattern);
  attributes["mesh_shape"] = std::vector<int64_t>{nranks};
  attributes["axes_row"] = std::vector<int64_t>{0};
  return attributes;
}

inline Attributes AllGather(int64_t nranks, int64_t m, int64_t n, int64_t k) {
  return OneAxis("all_gather", nranks, m, n, k);
}
inline Attributes ReduceScatter(int64_t nranks, int64_t m, int64_t n, int64_t k) {
  return OneAxis("reduce_scatter", nranks, m, n, k);
}
inline Attributes AllReduce(int64_t nranks, int64_t m, int64_t n, int64_t k) {
  return OneAxis("all_reduce", nranks, m, n, k);
}

// A mesh of nprow × npcol devices, both axes in one group.
inline Attributes Grid(int64_t nprow, int64_t npcol, int64_t m, int64_t n, int64_t k) {
  Attributes attributes = Local(m, n, k);
  attributes["pattern"] = std::string("grid");
  attributes["mesh_shape"] = std::vector<int64_t>{nprow, npcol};
  attributes["axes_row"] = std::vector<int64_t>{0};
  attributes["axes_col"] = std::vector<int64_t>{1};
  return attributes;
}

// The same in blocks of 2 along m, 3 along n and 4 along k; the first blocks are on process rows and columns 1, if
// there are any.
inline Attributes Cyclic(int64_t nprow, int64_t npcol, int64_t m, int64_t n, int64_t k, bool is_a_plain = true,
                         bool is_b_plain = true) {
  Attributes attributes = Grid(nprow, npcol, m, n, k);
  attributes["trans_a"] = std::string(is_a_plain ? "N" : "T");
  attributes["trans_b"] = std::string(is_b_plain ? "N" : "T");
  const int64_t row = nprow > 1 ? 1 : 0, col = npcol > 1 ? 1 : 0;
  attributes["layout_a"] = is_a_plain ? std::vector<int64_t>{2, 4, row, 0} : std::vector<int64_t>{4, 2, 0, col};
  attributes["layout_b"] = is_b_plain ? std::vector<int64_t>{4, 3, 0, col} : std::vector<int64_t>{3, 4, row, 0};
  attributes["layout_d"] = std::vector<int64_t>{2, 3, row, col};
  return attributes;
}

}  // namespace jaxmp::tests

#endif  // JAXMP_TESTS_PROBLEMS_H_
