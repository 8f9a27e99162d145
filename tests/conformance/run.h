// One rank's part in the cases: it makes the library's objects, calls it, and judges what it finds in its memory.
#ifndef JAXMP_TESTS_CONFORMANCE_RUN_H_
#define JAXMP_TESTS_CONFORMANCE_RUN_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "tests/conformance/backend.h"
#include "tests/conformance/buffers.h"

namespace jaxmp::conformance {

struct Outcome {
  std::string stage = "done";  // or the function that refused first
  int status = CUBLASMP_STATUS_SUCCESS;
  std::string error;  // the reason, or why the run failed after Matmul had accepted it
  size_t workspace = 0;
  std::map<std::string, Verdict> results;
  bool is_memory_intact = true;  // operands, and what lies around every buffer
  // Where an all-reduce adds C: whether D is right on this rank if that is ahead of the reduction, and if it is behind.
  std::optional<bool> c_is_ahead, c_is_behind;
};

// One rank through all cases. The library's handle, its grids and its workspace are made once, as a plan makes them.
class Runner {
 public:
  Runner(const Backend& backend, Rank& rank, int number, int nranks);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Makes what all cases share; collective.
  Status start();
  // Whether the ranks have memory that the library knows; it then takes no algorithm that overlaps by its name.
  bool is_symmetric() const { return is_symmetric_; }
  // Collective too, with the same case on every rank. `index` counts the calls.
  Outcome run(const Case& c, const Operands& operands, const Expected& expected, int64_t index);

 private:
  friend class CaseRun;
  using GridKey = std::tuple<int64_t, int64_t, int>;
  cublasMpGrid_t grid(const test::Grid& grid, cublasMpStatus_t* status);

  const Backend& backend_;
  const MpApi& api_;
  Rank& rank_;
  int number_, nranks_;
  cublasMpHandle_t handle_ = nullptr;
  std::map<GridKey, cublasMpGrid_t> grids_;
  cublasMpGrid_t of_rows_ = nullptr,
                 of_columns_ = nullptr;  // of `grids_`: those with which the workspace is registered
  void* registered_ = nullptr;           // where it is not symmetric, the rank's own memory
  bool is_symmetric_ = true;
  void* plain_ = nullptr;
};

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_RUN_H_
