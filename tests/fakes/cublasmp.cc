// A libcublasmp.so.0 over hostmp: products run on fake streams, and collective functions block until every rank has
// come. It requires what the header requires of its caller: a current context, the handle's context, equal arguments on
// all ranks, and a workspace in its own memory.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <new>
#include <string>
#include <tuple>

#include "csrc/cublasmp/api_table.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "tests/fakes/cublasmp_product.h"
#include "tests/fakes/cublasmp_state.h"
#include "tests/fakes/fake.h"

FAKE(cuStreamGetCtx);  // libcuda's
FAKE(ncclMemAlloc);    // libnccl's
FAKE(ncclMemFree);

namespace {

using namespace fakes;  // NOLINT

#define ENTER(name) \
  if (const cublasMpStatus_t entered = Enter(name); entered != CUBLASMP_STATUS_SUCCESS) return entered

int OrdinalOf(CUstream stream) {
  CUcontext context = nullptr;
  return stream && ::cuStreamGetCtx(stream, &context) == CUDA_SUCCESS ? *reinterpret_cast<int*>(context) : -1;
}

void LoadBlas() {
  static const bool is_loaded = [] {
    const char* path = std::getenv("JAXMP_BLAS");
    return path && jaxmp::hostmp::LoadBlas(path).ok();
  }();
  if (!is_loaded) std::abort();  // a test that does not name a BLAS
}

// True if one rank's product is cuBLASLt's alone; no source promises this for operands on different grids.
bool IsLocal(int nranks, std::initializer_list<cublasMpMatrixDescriptor_t> operands) {
  const auto is_alike = [&](cublasMpMatrixDescriptor_t x) {
    return !x || x->grid.layout == (*operands.begin())->grid.layout;
  };
  return nranks == 1 && std::all_of(operands.begin(), operands.end(), is_alike);
}

const char* AlgorithmOf(cublasMpMatmulDescriptor_t matmul, const cublasMpGrid& grid, int nranks) {
  if (matmul->values[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE] & CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE) {
    return "Matmul + AllReduce";
  }
  if (grid.nprow == nranks) return "AllGather + Matmul";
  return grid.npcol == nranks ? "Matmul + ReduceScatter" : "generic Matmul";
}

bool IsExplicit(cublasMpMatmulDescriptor_t matmul) {
  const auto algo = matmul->values[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE];
  return algo != CUBLASMP_MATMUL_ALGO_TYPE_DEFAULT && algo != CUBLASMP_MATMUL_ALGO_TYPE_NO_OVERLAP;
}

}  // namespace

#define FAKE_FUNCTION(name) FAKE(cublasMp##name);
JAXMP_CUBLASMP_FUNCTIONS(FAKE_FUNCTION)
FAKE(cublasMpLoggerSetCallback);
FAKE(cublasMpLoggerSetFile);
FAKE(cublasMpLoggerSetLevel);

cublasMpStatus_t cublasMpGetVersion(int* version) {
  *version = fakes::Knob("FAKE_CUBLASMP_VERSION", 1000);
  return CUBLASMP_STATUS_SUCCESS;
}
const char* cublasMpGetStatusString(cublasMpStatus_t status) { return host().GetStatusString(status); }
#ifndef FAKE_CUBLASMP_WITHOUT_NUMROC
int64_t cublasMpNumroc(int64_t n, int64_t nb, uint32_t iproc, uint32_t isrcproc, uint32_t nprocs) {
  return host().Numroc(n, nb, iproc, isrcproc, nprocs);
}
#endif
cublasMpStatus_t cublasMpLoggerSetCallback(cublasMpLoggerCallback_t callback) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().logger = callback;
  return CUBLASMP_STATUS_SUCCESS;
}
cublasMpStatus_t cublasMpLoggerSetFile(FILE*) { return CUBLASMP_STATUS_SUCCESS; }
cublasMpStatus_t cublasMpLoggerSetLevel(int level) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log_level = level;
  return CUBLASMP_STATUS_SUCCESS;
}

cublasMpStatus_t cublasMpCreate(cublasMpHandle_t* handle, cudaStream_t stream) {
  ENTER("Create");
  const cublasMpStatus_t status = host().Create(handle, nullptr);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (status == CUBLASMP_STATUS_SUCCESS) state().handles[*handle] = {fake_cuda_ordinal(), stream};
  return status;
}
cublasMpStatus_t cublasMpDestroy(cublasMpHandle_t handle) {
  ENTER("Destroy");
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (state().handles.erase(handle) == 0) return CUBLASMP_STATUS_INVALID_VALUE;
  }
  return host().Destroy(handle);
}
cublasMpStatus_t cublasMpSetStream(cublasMpHandle_t handle, cudaStream_t stream) {
  ENTER("SetStream");
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().handles.find(handle);
  if (found == state().handles.end() || OrdinalOf(stream) != found->second.ordinal) {
    return CUBLASMP_STATUS_INVALID_VALUE;
  }
  found->second.stream = stream;
  return CUBLASMP_STATUS_SUCCESS;
}

cublasMpStatus_t cublasMpGridCreate(int64_t nprow, int64_t npcol, cublasMpGridLayout_t layout, ncclComm_t comm,
                                    cublasMpGrid_t* grid) {
  ENTER("GridCreate");
  const cublasMpStatus_t agreed = Agree(comm, (nprow * 1000 + npcol) * 2 + layout);
  if (agreed != CUBLASMP_STATUS_SUCCESS) return agreed;
  const cublasMpStatus_t status =
      host().GridCreate(nprow, npcol, layout, GroupOf(comm).comm(fake_nccl_rank(comm)), grid);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (status == CUBLASMP_STATUS_SUCCESS) {
    // The real library too uses communicators of its own for the collective work of a grid.
    ncclComm_t const own = state().grids[*grid] = fake_nccl_split(comm);
    state().comms.try_emplace({(*grid)->comm.group, (*grid)->comm.rank}, own);
  }
  return Report(status, "cublasMpGridCreate");
}
cublasMpStatus_t cublasMpGridDestroy(cublasMpGrid_t grid) {
  ENTER("GridDestroy");
  const ncclComm_t comm = CommOf(grid);
  if (!comm) return CUBLASMP_STATUS_INVALID_VALUE;
  const cublasMpStatus_t agreed = Agree(comm, 0);
  if (agreed != CUBLASMP_STATUS_SUCCESS) return agreed;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().grids.erase(grid);
  return host().GridDestroy(grid);
}

// Windows are symmetric: equal sizes on every rank. Without them, returns an error at once and waits for no one.
cublasMpStatus_t Register(const char* function, cublasMpGrid_t grid, void* pointer, size_t size) {
  const ncclComm_t comm = CommOf(grid);
  if (!comm || size == 0) return CUBLASMP_STATUS_INVALID_VALUE;
  if (!IsSymmetric()) {
    Say(1, function, "no symmetric memory here");
    return CUBLASMP_STATUS_NOT_SUPPORTED;
  }
  const cublasMpStatus_t agreed = Agree(comm, static_cast<long long>(size));  // NOLINT
  if (agreed != CUBLASMP_STATUS_SUCCESS) return agreed;
  const cublasMpStatus_t status = host().BufferRegister(grid, pointer, size);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(status, function);
  Windows windows{};
  fake_nccl_gather(comm, kFakeOnHost, reinterpret_cast<long long>(pointer), windows.data());  // NOLINT
  std::lock_guard<std::mutex> lock(state().mutex);
  state().buffers[{pointer, grid}] = windows;
  return status;
}
cublasMpStatus_t Deregister(cublasMpGrid_t grid, void* pointer) {
  const ncclComm_t comm = CommOf(grid);
  if (!comm) return CUBLASMP_STATUS_INVALID_VALUE;
  const cublasMpStatus_t agreed = Agree(comm, 0);
  if (agreed != CUBLASMP_STATUS_SUCCESS) return agreed;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().buffers.erase({pointer, grid}) == 0) return CUBLASMP_STATUS_INVALID_VALUE;
  return host().BufferDeregister(grid, pointer);
}

cublasMpStatus_t cublasMpMalloc(cublasMpGrid_t grid, void** pointer, size_t size) {
  ENTER("Malloc");
  if (::ncclMemAlloc(pointer, size) != ncclSuccess) return CUBLASMP_STATUS_ALLOCATION_FAILED;
  const cublasMpStatus_t status = Register("cublasMpMalloc", grid, *pointer, size);
  if (status != CUBLASMP_STATUS_SUCCESS) (void)::ncclMemFree(*pointer);
  return status;
}
cublasMpStatus_t cublasMpFree(cublasMpGrid_t grid, void* pointer) {
  ENTER("Free");
  const cublasMpStatus_t status = Deregister(grid, pointer);
  if (status == CUBLASMP_STATUS_SUCCESS) (void)::ncclMemFree(pointer);
  return status;
}
cublasMpStatus_t cublasMpBufferRegister(cublasMpGrid_t grid, void* pointer, size_t size) {
  ENTER("BufferRegister");
  return Register("cublasMpBufferRegister", grid, pointer, size);
}
cublasMpStatus_t cublasMpBufferDeregister(cublasMpGrid_t grid, void* pointer) {
  ENTER("BufferDeregister");
  return Deregister(grid, pointer);
}

cublasMpStatus_t cublasMpMatrixDescriptorCreate(int64_t m, int64_t n, int64_t mb, int64_t nb, int64_t rsrc,
                                                int64_t csrc, int64_t lld, cudaDataType_t type, cublasMpGrid_t grid,
                                                cublasMpMatrixDescriptor_t* desc) {
  ENTER("MatrixDescriptorCreate");
  const cublasMpStatus_t status = host().MatrixDescriptorCreate(m, n, mb, nb, rsrc, csrc, lld, type, grid, desc);
  if (status == CUBLASMP_STATUS_SUCCESS) {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().descriptors.insert(*desc);
  }
  return Report(status, "cublasMpMatrixDescriptorCreate");
}
cublasMpStatus_t cublasMpMatrixDescriptorDestroy(cublasMpMatrixDescriptor_t desc) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().descriptors.erase(desc) == 0) return CUBLASMP_STATUS_INVALID_VALUE;
  return host().MatrixDescriptorDestroy(desc);
}

cublasMpStatus_t cublasMpMatmulDescriptorCreate(cublasMpMatmulDescriptor_t* desc, cublasComputeType_t compute) {
  ENTER("MatmulDescriptorCreate");
  const cublasMpStatus_t status = host().MatmulDescriptorCreate(desc, compute);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (status == CUBLASMP_STATUS_SUCCESS) state().descriptors.insert(*desc);
  return status;
}
cublasMpStatus_t cublasMpMatmulDescriptorDestroy(cublasMpMatmulDescriptor_t desc) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().descriptors.erase(desc) == 0) return CUBLASMP_STATUS_INVALID_VALUE;
  return host().MatmulDescriptorDestroy(desc);
}
cublasMpStatus_t cublasMpMatmulDescriptorSetAttribute(cublasMpMatmulDescriptor_t desc,
                                                      cublasMpMatmulDescriptorAttribute_t attribute, const void* buffer,
                                                      size_t bytes) {
  ENTER("SetAttribute");
  return Report(host().MatmulDescriptorSetAttribute(desc, attribute, buffer, bytes),
                "cublasMpMatmulDescriptorSetAttribute");
}
cublasMpStatus_t cublasMpMatmulDescriptorGetAttribute(cublasMpMatmulDescriptor_t desc,
                                                      cublasMpMatmulDescriptorAttribute_t attribute, void* buffer,
                                                      size_t bytes, size_t* written) {
  return host().MatmulDescriptorGetAttribute(desc, attribute, buffer, bytes, written);
}

cublasMpStatus_t cublasMpMatmul_bufferSize(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmul, int64_t m,
                                           int64_t n, int64_t k, const void* alpha, const void* a, int64_t ia,
                                           int64_t ja, cublasMpMatrixDescriptor_t desc_a, const void* b, int64_t ib,
                                           int64_t jb, cublasMpMatrixDescriptor_t desc_b, const void* beta,
                                           const void* c, int64_t ic, int64_t jc, cublasMpMatrixDescriptor_t desc_c,
                                           void* d, int64_t id, int64_t jd, cublasMpMatrixDescriptor_t desc_d,
                                           size_t* device_bytes, size_t* host_bytes) {
  ENTER("Matmul_bufferSize");
  LoadBlas();
  const cublasMpStatus_t status =
      host().Matmul_bufferSize(handle, matmul, m, n, k, alpha, a, ia, ja, desc_a, b, ib, jb, desc_b, beta, c, ic, jc,
                               desc_c, d, id, jd, desc_d, device_bytes, host_bytes);
  if (status != CUBLASMP_STATUS_SUCCESS) return Report(status, "cublasMpMatmul_bufferSize");
  // hostmp rarely asks for memory, but the real library does.
  *device_bytes = std::max({*device_bytes, static_cast<size_t>(8 * m * n), sizeof(void*) * kFakeMostRanks});
  *host_bytes = 64;
  return status;
}

cublasMpStatus_t cublasMpMatmul(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmul, int64_t m, int64_t n,
                                int64_t k, const void* alpha, const void* a, int64_t ia, int64_t ja,
                                cublasMpMatrixDescriptor_t desc_a, const void* b, int64_t ib, int64_t jb,
                                cublasMpMatrixDescriptor_t desc_b, const void* beta, const void* c, int64_t ic,
                                int64_t jc, cublasMpMatrixDescriptor_t desc_c, void* d, int64_t id, int64_t jd,
                                cublasMpMatrixDescriptor_t desc_d, void* work, size_t bytes, void* host_work,
                                size_t host_bytes) {
  ENTER("Matmul");
  size_t needed = 0, none = 0;
  const cublasMpStatus_t checked =
      host().Matmul_bufferSize(handle, matmul, m, n, k, alpha, a, ia, ja, desc_a, b, ib, jb, desc_b, beta, c, ic, jc,
                               desc_c, d, id, jd, desc_d, &needed, &none);
  if (checked != CUBLASMP_STATUS_SUCCESS) return Report(checked, "cublasMpMatmul");
  if (bytes < needed || !HasWorkspace(work, bytes) || !host_work || host_bytes < 64) {
    Say(1, "cublasMpMatmul", "the workspace is missing, too small or not registered");
    return CUBLASMP_STATUS_INVALID_VALUE;
  }
  if (IsExplicit(matmul) && fake_nccl_nranks(CommOf(desc_d)) > 1 && !IsRegistered(work)) {
    Say(1, "cublasMpMatmul", "this algorithm needs a registered workspace");
    return CUBLASMP_STATUS_NOT_SUPPORTED;
  }
  const Handle of = HandleOf(handle);
  ncclComm_t const comm = CommOf(desc_d);
  const bool is_local = IsLocal(fake_nccl_nranks(comm), {desc_a, desc_b, desc_c, desc_d});
  Say(5, "cublasMpMatmul",
      std::string("Using ") + (is_local ? "local Matmul" : AlgorithmOf(matmul, desc_d->grid, fake_nccl_nranks(comm))));
  const bool has_c = desc_c != nullptr;
  auto* const x = new (fake_cuda_share(sizeof(Arguments))) Arguments{};
  std::tie(x->m, x->n, x->k, x->bytes, x->work) = std::tie(m, n, k, bytes, work);
  std::tie(x->a, x->ia, x->ja, x->desc_a) = std::tie(a, ia, ja, *desc_a);
  std::tie(x->b, x->ib, x->jb, x->desc_b) = std::tie(b, ib, jb, *desc_b);
  std::tie(x->c, x->ic, x->jc, x->desc_c) = std::tie(c, ic, jc, has_c ? *desc_c : *desc_d);
  std::tie(x->d, x->id, x->jd, x->desc_d) = std::tie(d, id, jd, *desc_d);
  std::tie(x->values, x->is_set) = std::tie(matmul->values, matmul->is_set);
  std::tie(x->has_c, x->fixed_reduction_order) = std::tie(has_c, matmul->fixed_reduction_order);
  std::memcpy(x->alpha.data(), alpha, x->alpha.size());
  std::memcpy(x->beta.data(), beta, x->beta.size());
  auto* const product = new Product{x, comm, of.ordinal};
  product->Count();
  (void)cuLaunchHostFunc(of.stream, Product::Run, product);
  return CUBLASMP_STATUS_SUCCESS;
}
