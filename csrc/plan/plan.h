// A plan: the cuBLASMp objects of one problem for every rank of a group, ready to run.
//
// A plan depends only on its problem. What a call changes (stream, pointers, workspace) is in execution contexts: a
// call takes one for itself, so that one plan serves any number of calls at once. The communicator handles everything
// else that differs between libraries: who makes the objects of a rank and when, memory, and what plans share.
#pragma once

#include <complex>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/plan/communicator.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/matmul_problem.h"

namespace jaxmp {

// One rank's operands and results; null if the problem has none.
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

// Set a problem's static facts, and a call's pointers, as attributes of cuBLASMp's matmul descriptor. SetAttributes
// sets everything that does not change between calls.
Status SetAttributes(const MpApi& api, abi::cublasMpMatmulDescriptor_t matmul, const Problem& p,
                     const Distribution& layout);

Status SetPointers(const MpApi& api, abi::cublasMpMatmulDescriptor_t matmul, const Problem& p, const Buffers& buffers);

// An object of the library, destroyed by a function of the same table that made it.
template <typename Object>
using Owned = std::unique_ptr<Object, abi::cublasMpStatus_t (*)(Object*)>;

class Plan {
 public:
  static StatusOr<std::shared_ptr<Plan>> Make(const MpApi& api, const Problem& problem,
                                              std::shared_ptr<const Communicator> communicator);

  // Held by one call while it runs: a handle, a matmul descriptor and the workspace.
  struct ExecutionContext;
  struct ReturnExecutionContext {
    Plan* plan = nullptr;
    int local_rank = 0;
    void operator()(ExecutionContext* execution) const { plan->TakeBack(local_rank, execution); }
  };
  using ExecutionHandle = std::unique_ptr<ExecutionContext, ReturnExecutionContext>;  // must not outlive the plan

  // Takes an execution context. Makes the local rank's objects if they are missing, with this call's buffers and
  // stream.
  StatusOr<ExecutionHandle> Take(int local_rank, const Buffers& buffers, abi::cudaStream_t stream);

  // Starts this rank's part of the product on the stream. Everything that `buffers` points to must stay until the
  // stream has completed. The execution context must stay as long, unless its next call comes after this one on the
  // stream.
  Status Run(int local_rank, ExecutionContext& execution, const Buffers& buffers, abi::cudaStream_t stream);

  const Problem& problem() const { return problem_; }
  const Distribution& distribution() const { return distribution_; }
  const Communicator& communicator() const { return *communicator_; }
  int nranks() const { return communicator_->nranks(); }
  bool is_made(int local_rank) const { return local_ranks_[static_cast<size_t>(local_rank)]->is_made; }
  bool is_empty() const { return problem_.m == 0 || problem_.n == 0; }  // D has no elements: nothing to run
  size_t device_workspace(int local_rank) const { return local_ranks_[static_cast<size_t>(local_rank)]->device_bytes; }
  size_t host_workspace(int local_rank) const { return local_ranks_[static_cast<size_t>(local_rank)]->host_bytes; }

 private:
  // A scalar in cuBLASMp's scale type: float, double or a complex pair of them.
  struct Scalar {
    alignas(16) unsigned char bytes[16];
  };
  // A rank's objects that do not depend on a call; made once, then only read, except for the free execution contexts.
  struct LocalRank {
    bool is_made = false;
    std::shared_ptr<abi::cublasMpGrid> grids[3];  // by GridKind, null if unused
    Owned<abi::cublasMpMatrixDescriptor> a{nullptr, nullptr}, b{nullptr, nullptr}, c{nullptr, nullptr},
        d{nullptr, nullptr};  // c: null without C
    Scalar beta;
    size_t device_bytes = 0, host_bytes = 0;
    std::mutex mutex;
    std::vector<std::unique_ptr<ExecutionContext>> free;  // guarded by mutex
  };

  Plan(const MpApi& api, const Problem& problem, const Distribution& layout,
       std::shared_ptr<const Communicator> communicator);

  Status MakeLocalRank(int local_rank, const Buffers& buffers, abi::cudaStream_t stream);
  Status MakeObjects(int local_rank, const Buffers& buffers, abi::cudaStream_t stream);
  Status MakeMatrix(LocalRank& local_rank, const MatrixDistribution& layout, DType dtype,
                    Owned<abi::cublasMpMatrixDescriptor>* matrix);
  StatusOr<std::unique_ptr<ExecutionContext>> MakeExecutionContext(int local_rank, abi::cudaStream_t stream);
  Status TakeWorkspace(int local_rank, ExecutionContext& execution);
  GridShape ShapeOf(GridKind kind) const;
  RankObjects& objects(int local_rank) const { return communicator_->rank_objects(local_rank); }
  // The size query and the launch differ only in their last arguments, so both go through here.
  template <typename Function, typename... Rest>
  Status Invoke(Function function, const char* name, const LocalRank& local_rank, ExecutionContext& execution,
                const Buffers& buffers, Rest... rest);
  Scalar MakeScalar(std::complex<double> value) const;
  void TakeBack(int local_rank, ExecutionContext* execution);

  const MpApi& api_;
  const Problem problem_;
  const Distribution distribution_;
  const std::shared_ptr<const Communicator> communicator_;
  const Scalar alpha_;
  std::vector<std::unique_ptr<LocalRank>> local_ranks_;
};

}  // namespace jaxmp
