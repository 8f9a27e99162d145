// One rank's part in the cases: it makes the library's objects, calls it, and judges what it finds in its memory.
#ifndef JAXMP_TESTS_CONFORMANCE_RUN_H_
#define JAXMP_TESTS_CONFORMANCE_RUN_H_

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
  bool is_memory_intact = true;  // operands, and the margins of every buffer
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
  // True if the library can register the ranks' memory; else it takes no overlapping algorithm by its name.
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
                 of_columns_ = nullptr;  // of `grids_`: the workspace is registered with these
  // One for each pattern, as plans have it; if memory is not symmetric, the rank's own.
  std::map<Pattern, void*> registered_;
  bool is_symmetric_ = true;
  void* plain_ = nullptr;
};

template <typename Object>
using Owned = std::unique_ptr<Object, cublasMpStatus_t (*)(Object*)>;

// One case on one rank. Each step records the first function that refuses.
class CaseRun {
 public:
  CaseRun(Runner* runner, const Case& c, Buffers* buffers)
      : runner_(*runner), api_(runner->api_), c_(c), x_(*buffers) {}

  // Makes the descriptors, and asks for the workspace.
  bool prepare() { return describe() && set_attributes() && query(); }
  // The arguments of Matmul, as they should be.
  Call ready();
  cublasMpStatus_t start(const Call& call, cudaStream_t stream);
  // ready() and start(), changed as the case wants it, up to the end of the product.
  bool call(int64_t index);
  // True if the margin after the queried part of the workspace is as it was.
  bool workspace_is_intact();
  Outcome outcome;

 private:
  bool describe();
  bool set_attributes();
  bool query();
  bool check(cublasMpStatus_t status, const char* stage);
  bool make(const test::Layout& layout, const Description& description, Owned<cublasMpMatrixDescriptor>* made);
  bool set(int attribute, const void* value, size_t size);
  bool set_number(int attribute, int64_t value, size_t size = 0);
  bool set_pointer(int attribute, const void* pointer) { return set(attribute, &pointer, sizeof(pointer)); }
  bool set_epilog();
  bool set_scales();
  Call arguments();
  char* workspace() const {
    return static_cast<char*>(c_.workspace == Workspace::kPlain ? runner_.plain_ : runner_.registered_.at(c_.pattern));
  }

  Runner& runner_;
  const MpApi& api_;
  const Case& c_;
  Buffers& x_;
  Owned<cublasMpMatrixDescriptor> a_{nullptr, nullptr}, b_{nullptr, nullptr}, c_desc_{nullptr, nullptr},
      d_{nullptr, nullptr};
  Owned<cublasMpMatmulDescriptor> matmul_{nullptr, nullptr};
  std::array<char, 16> alpha_{}, beta_{};
  std::vector<char> host_work_;
};

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_RUN_H_
