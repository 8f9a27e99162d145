// A plan: one problem turned into cuBLASMp's objects for every rank of a group, ready to run.
//
// A plan is a function of its problem alone. What a call changes (stream, pointers, workspace) sits in slots: each call
// takes one for itself, so that one plan serves any number of calls at once.
#ifndef JAXMP_PLAN_H_
#define JAXMP_PLAN_H_

#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/communicators.h"
#include "csrc/mp_api.h"
#include "csrc/plan_layout.h"
#include "csrc/problem.h"
#include "csrc/status.h"

namespace jaxmp {

// One rank's operands and results; null where the problem has none.
struct Buffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  const void* bias = nullptr;
  const void* aux_input = nullptr;
  void* d = nullptr;
  void* aux = nullptr;
  void* gradient = nullptr;  // of the bias
  const void *scale_a = nullptr, *scale_b = nullptr, *scale_c = nullptr, *scale_d = nullptr, *scale_aux = nullptr;
  void *amax_d = nullptr, *amax_aux = nullptr, *d_out_scale = nullptr;
};

// An object of the library, destroyed by the function of the table that it came from.
template <typename Object>
using Owned = std::unique_ptr<Object, abi::cublasMpStatus_t (*)(Object*)>;

class Plan {
 public:
  static StatusOr<std::shared_ptr<Plan>> Make(const MpApi& api, const Problem& problem,
                                              std::shared_ptr<const Communicator> communicator);

  // What one call holds while it runs: a handle, a matmul descriptor and the workspace.
  struct Slot;
  struct ReturnSlot {
    Plan* plan = nullptr;
    int rank = 0;
    void operator()(Slot* slot) const { plan->TakeBack(rank, slot); }
  };
  using Lease = std::unique_ptr<Slot, ReturnSlot>;  // must not outlive the plan

  StatusOr<Lease> Take(int rank);

  // Starts this rank's part of the product on the stream. The slot and everything that `buffers` points to must stay
  // until the stream has completed.
  Status Run(int rank, Slot& slot, const Buffers& buffers, abi::cudaStream_t stream);

  const Problem& problem() const { return problem_; }
  const Layout& layout() const { return layout_; }
  const Communicator& communicator() const { return *communicator_; }
  int nranks() const { return communicator_->nranks(); }
  bool is_empty() const { return problem_.m == 0 || problem_.n == 0; }  // D has no elements: nothing to run
  size_t device_workspace(int rank) const { return ranks_[static_cast<size_t>(rank)]->device_bytes; }
  size_t host_workspace(int rank) const { return ranks_[static_cast<size_t>(rank)]->host_bytes; }
  const char* algorithm() const;

 private:
  // A scalar in cuBLASMp's scale type: float, double or a complex pair of them.
  struct Scalar {
    alignas(16) unsigned char bytes[16];
  };
  // What a rank has whatever the call; made once, then only read, but for the free slots.
  struct Rank {
    std::vector<Owned<abi::cublasMpGrid>> grids;  // by GridKind, null where unused
    Owned<abi::cublasMpMatrixDescriptor> a{nullptr, nullptr}, b{nullptr, nullptr}, c{nullptr, nullptr},
        d{nullptr, nullptr};  // c: null without C
    Scalar beta;
    size_t device_bytes = 0, host_bytes = 0;
    std::mutex mutex;
    std::vector<std::unique_ptr<Slot>> free;  // guarded by mutex
  };

  Plan(const MpApi& api, const Problem& problem, const Layout& layout,
       std::shared_ptr<const Communicator> communicator);

  Status MakeRank(int rank);
  Status MakeGrid(int rank, GridKind kind);
  Status MakeMatrix(Rank& rank, const MatrixLayout& layout, DType dtype, Owned<abi::cublasMpMatrixDescriptor>* matrix);
  StatusOr<std::unique_ptr<Slot>> MakeSlot();
  Status SetAttributes(Slot& slot);
  Status SetHints(Slot& slot);
  template <typename Value>
  Status SetAttribute(Slot& slot, abi::cublasMpMatmulDescriptorAttribute_t attribute, const Value& value);
  Status SetScaleModes(Slot& slot);
  Status SetPointers(Slot& slot, const Buffers& buffers);
  Status AllocateWorkspace(const Rank& rank, Slot& slot);
  // The size query and the launch take the same arguments but for their last ones, so both go through here.
  template <typename Function, typename... Rest>
  Status Call(Function function, const char* name, const Rank& rank, Slot& slot, const Buffers& buffers, Rest... rest);
  Status Check(abi::cublasMpStatus_t status, const char* call) const;
  Scalar MakeScalar(std::complex<double> value) const;
  void TakeBack(int rank, Slot* slot);

  const MpApi& api_;
  const Problem problem_;
  const Layout layout_;
  const std::shared_ptr<const Communicator> communicator_;
  const Scalar alpha_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace jaxmp

#endif  // JAXMP_PLAN_H_
