// cuBLASMp's functions: each unpacks its arguments, checks them and calls the code that does the work.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/cublasmp/api_table.h"
#include "csrc/cublasmp/status.h"
#include "csrc/hostmp/exec/matmul_work.h"
#include "csrc/hostmp/handles/handles.h"
#include "csrc/hostmp/handles/matmul_call.h"
#include "csrc/hostmp/tiling/product_tiling.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {

namespace {

using namespace abi;  // NOLINT: cuBLASMp's own names, everywhere below

constexpr int kVersion = 1000;  // of the header that declares these functions: 0.10.0

thread_local std::string error_message;

// Runs every call, because a C function must not throw and last_error() reports the last call.
template <typename Function>
cublasMpStatus_t Guarded(Function function) noexcept {
  Status status;
  try {
    status = function();
  } catch (const std::exception& exception) {
    status = ResourceExhausted(exception.what());
  }
  error_message = status.message();
  return NumberOf(status.code());
}

const char* LastError() { return error_message.c_str(); }

template <typename T, typename... Arguments>
Status MakeObject(T** to, const char* name, Arguments&&... arguments) {
  if (!to) return InvalidArgument(name, " is null; pass where to put the new object");
  *to = new T{std::forward<Arguments>(arguments)...};
  return {};
}

template <typename T>
Status DestroyObject(T* object, const char* name) {
  if (!object) return InvalidArgument(name, " is null");
  delete object;
  return {};
}

cublasMpStatus_t GetVersion(int* version) {
  return Guarded([&]() -> Status {
    if (!version) return InvalidArgument("version is null");
    *version = kVersion;
    return {};
  });
}

const char* GetStatusString(cublasMpStatus_t status) { return WordOf(status).name; }

int64_t Numroc(int64_t n, int64_t nb, uint32_t iproc, uint32_t isrcproc, uint32_t nprocs) {
  if (n < 0 || nb <= 0 || nprocs == 0 || iproc >= nprocs || isrcproc >= nprocs) return 0;
  return LocalExtent({n, nb, nprocs, isrcproc}, iproc);
}

cublasMpStatus_t Create(cublasMpHandle_t* handle, cudaStream_t stream) {
  return Guarded([&] { return MakeObject(handle, "handle", reinterpret_cast<Stream*>(stream)); });
}
cublasMpStatus_t Destroy(cublasMpHandle_t handle) {
  return Guarded([&] { return DestroyObject(handle, "handle"); });
}
cublasMpStatus_t SetStream(cublasMpHandle_t handle, cudaStream_t stream) {
  return Guarded([&]() -> Status {
    if (!handle) return InvalidArgument("handle is null");
    handle->stream = reinterpret_cast<Stream*>(stream);
    return {};
  });
}

cublasMpStatus_t GridCreate(int64_t nprow, int64_t npcol, cublasMpGridLayout_t layout, ncclComm_t comm,
                            cublasMpGrid_t* grid) {
  return Guarded([&]() -> Status {
    if (!comm) return InvalidArgument("comm is null; take it from a Group");
    if (layout != CUBLASMP_GRID_LAYOUT_COL_MAJOR && layout != CUBLASMP_GRID_LAYOUT_ROW_MAJOR) {
      return InvalidArgument("layout ", static_cast<int>(layout), " is neither COL_MAJOR (0) nor ROW_MAJOR (1)");
    }
    const int64_t nranks = comm->nranks;
    if (nprow <= 0 || npcol <= 0 || nprow > nranks || npcol > nranks || nprow * npcol != nranks) {
      return InvalidArgument("a grid of ", nprow, "x", npcol, " does not hold the ", comm->nranks,
                             " ranks of its communicator");
    }
    return MakeObject(grid, "grid", cublasMpGrid{nprow, npcol, layout, *comm});
  });
}
cublasMpStatus_t GridDestroy(cublasMpGrid_t grid) {
  return Guarded([&] { return DestroyObject(grid, "grid"); });
}

// Accepts any memory, because nothing is registered.
Status CheckBuffer(cublasMpGrid_t grid, const void* ptr) {
  if (!grid) return InvalidArgument("grid is null");
  return ptr ? Status() : InvalidArgument("ptr is null");
}
cublasMpStatus_t Malloc(cublasMpGrid_t grid, void** ptr, size_t size) {
  return Guarded([&]() -> Status {
    JAXMP_RETURN_IF_ERROR(CheckBuffer(grid, ptr));
    const auto rounded = static_cast<size_t>(RoundUp(static_cast<int64_t>(size > 0 ? size : 1), kAlignment));
    *ptr = std::aligned_alloc(kAlignment, rounded);
    return *ptr ? Status() : ResourceExhausted("no memory for ", size, " bytes");
  });
}
cublasMpStatus_t Free(cublasMpGrid_t grid, void* ptr) {
  return Guarded([&]() -> Status {
    JAXMP_RETURN_IF_ERROR(CheckBuffer(grid, ptr));
    std::free(ptr);
    return {};
  });
}
cublasMpStatus_t BufferRegister(cublasMpGrid_t grid, void* ptr, size_t) {
  return Guarded([&] { return CheckBuffer(grid, ptr); });
}
cublasMpStatus_t BufferDeregister(cublasMpGrid_t grid, void* ptr) {
  return Guarded([&] { return CheckBuffer(grid, ptr); });
}

cublasMpStatus_t MatrixDescriptorCreate(int64_t m, int64_t n, int64_t mb, int64_t nb, int64_t rsrc, int64_t csrc,
                                        int64_t lld, cudaDataType_t type, cublasMpGrid_t grid,
                                        cublasMpMatrixDescriptor_t* desc) {
  return Guarded([&]() -> Status {
    if (!grid) return InvalidArgument("grid is null");
    const cublasMpMatrixDescriptor filled = {{m, mb, grid->nprow, rsrc}, {n, nb, grid->npcol, csrc}, lld, type, *grid};
    JAXMP_RETURN_IF_ERROR(CheckMatrix(filled));
    return MakeObject(desc, "desc", filled);
  });
}
cublasMpStatus_t MatrixDescriptorDestroy(cublasMpMatrixDescriptor_t desc) {
  return Guarded([&] { return DestroyObject(desc, "desc"); });
}

cublasMpStatus_t MatmulDescriptorCreate(cublasMpMatmulDescriptor_t* desc, cublasComputeType_t compute) {
  return Guarded([&] {
    cublasMpMatmulDescriptor filled = {};
    std::memcpy(&filled.values[CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMPUTE_TYPE], &compute, sizeof(compute));
    return MakeObject(desc, "matmulDesc", filled);
  });
}
cublasMpStatus_t MatmulDescriptorDestroy(cublasMpMatmulDescriptor_t desc) {
  return Guarded([&] { return DestroyObject(desc, "matmulDesc"); });
}

Status CheckAttribute(cublasMpMatmulDescriptor_t desc, int attribute, const void* buffer, size_t bytes) {
  if (!desc) return InvalidArgument("matmulDesc is null");
  if (!buffer) return InvalidArgument("buf is null");
  const size_t size = AttributeSize(attribute);
  if (size == 0) return InvalidArgument("attribute ", attribute, " does not exist");
  if (size == bytes) return {};
  return InvalidArgument("attribute ", attribute, " has ", size, " bytes, got sizeInBytes=", bytes);
}
cublasMpStatus_t MatmulDescriptorSetAttribute(cublasMpMatmulDescriptor_t desc,
                                              cublasMpMatmulDescriptorAttribute_t attribute, const void* buffer,
                                              size_t bytes) {
  return Guarded([&]() -> Status {
    JAXMP_RETURN_IF_ERROR(CheckAttribute(desc, attribute, buffer, bytes));
    uint64_t value = 0;
    std::memcpy(&value, buffer, bytes);
    const bool is_op = attribute == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA ||
                       attribute == CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB;
    if (is_op && value > CUBLAS_OP_C) {
      return InvalidArgument("attribute ", static_cast<int>(attribute), " must be 0 (N), 1 (T) or 2 (C), got ", value);
    }
    desc->values[attribute] = value;
    desc->is_set[attribute] = true;
    return {};
  });
}
cublasMpStatus_t MatmulDescriptorGetAttribute(cublasMpMatmulDescriptor_t desc,
                                              cublasMpMatmulDescriptorAttribute_t attribute, void* buffer, size_t bytes,
                                              size_t* written) {
  return Guarded([&]() -> Status {
    JAXMP_RETURN_IF_ERROR(CheckAttribute(desc, attribute, buffer, bytes));
    std::memcpy(buffer, &desc->values[attribute], bytes);
    if (written) *written = bytes;
    return {};
  });
}

cublasMpStatus_t FixReductionOrder(cublasMpMatmulDescriptor_t desc) {
  return Guarded([&]() -> Status {
    if (!desc) return InvalidArgument("matmulDesc is null");
    desc->fixed_reduction_order = true;
    return {};
  });
}

cublasMpStatus_t Matmul_bufferSize(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmul, int64_t m, int64_t n,
                                   int64_t k, const void* alpha, const void* a, int64_t ia, int64_t ja,
                                   cublasMpMatrixDescriptor_t desc_a, const void* b, int64_t ib, int64_t jb,
                                   cublasMpMatrixDescriptor_t desc_b, const void* beta, const void* c, int64_t ic,
                                   int64_t jc, cublasMpMatrixDescriptor_t desc_c, void* d, int64_t id, int64_t jd,
                                   cublasMpMatrixDescriptor_t desc_d, size_t* device_bytes, size_t* host_bytes) {
  return Guarded([&]() -> Status {
    if (!device_bytes || !host_bytes) return InvalidArgument("a workspace size is null; pass where to put both");
    MatmulCall call;
    JAXMP_RETURN_IF_ERROR(ReadCall({handle, matmul, m,    n, k,  alpha, a,      ia, ja, desc_a, b,     ib,
                                    jb,     desc_b, beta, c, ic, jc,    desc_c, d,  id, jd,     desc_d},
                                   /*executes=*/false, &call));
    *device_bytes = static_cast<size_t>(call.tiling->workspace_bytes);
    *host_bytes = 0;
    return {};
  });
}

cublasMpStatus_t Matmul(cublasMpHandle_t handle, cublasMpMatmulDescriptor_t matmul, int64_t m, int64_t n, int64_t k,
                        const void* alpha, const void* a, int64_t ia, int64_t ja, cublasMpMatrixDescriptor_t desc_a,
                        const void* b, int64_t ib, int64_t jb, cublasMpMatrixDescriptor_t desc_b, const void* beta,
                        const void* c, int64_t ic, int64_t jc, cublasMpMatrixDescriptor_t desc_c, void* d, int64_t id,
                        int64_t jd, cublasMpMatrixDescriptor_t desc_d, void* device, size_t device_bytes, void*,
                        size_t) {
  return Guarded([&]() -> Status {
    auto mine = std::make_unique<MatmulRank>();
    MatmulCall& call = mine->call;
    JAXMP_RETURN_IF_ERROR(ReadCall({handle, matmul, m,    n, k,  alpha, a,      ia, ja, desc_a, b,     ib,
                                    jb,     desc_b, beta, c, ic, jc,    desc_c, d,  id, jd,     desc_d},
                                   /*executes=*/true, &call));
    JAXMP_RETURN_IF_ERROR(CheckWorkspace(call, device, device_bytes));
    call.workspace = static_cast<char*>(device);
    Arrival arrival;
    arrival.stream = handle->stream;
    for (uint32_t* amax : {call.amax_d, call.amax_aux}) {
      if (amax) *amax = 0;  // the tiles raise it
    }
    if (!arrival.stream || !arrival.stream->done) {
      return FailedPrecondition("the handle has no stream; call cublasMpSetStream with AsStream(&stream)");
    }
    if (call.nranks > 1 && !arrival.stream->rendezvous) {
      return FailedPrecondition("the stream has no rendezvous, which ", call.nranks, " ranks need");
    }
    const int rank = call.rank, nranks = call.nranks;
    arrival.call = std::move(mine);
    Arrive(std::move(arrival), rank, nranks);
    return {};
  });
}

}  // namespace

}  // namespace jaxmp::hostmp

namespace jaxmp {

const MpApi& host_api() {
#define JAXMP_LIST_FUNCTION(function) hostmp::function,
  static const MpApi api = {"hostmp", hostmp::FixReductionOrder, hostmp::LastError,
                            JAXMP_CUBLASMP_FUNCTIONS(JAXMP_LIST_FUNCTION)};
#undef JAXMP_LIST_FUNCTION
  return api;
}

}  // namespace jaxmp
