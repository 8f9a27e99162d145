// cublasMpMalloc and the registry of buffers.
#ifndef JAXMP_HOSTMP_HANDLES_BUFFERS_H_
#define JAXMP_HOSTMP_HANDLES_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/hostmp/handles/handles.h"

namespace jaxmp::hostmp {

constexpr int64_t kAlignment = 64;  // of every buffer: a cache line, and an AVX-512 register

StatusOr<void*> Allocate(const abi::cublasMpGrid& grid, size_t size);
Status Release(const abi::cublasMpGrid& grid, void* ptr);
Status RegisterBuffer(const abi::cublasMpGrid& grid, void* ptr, size_t size);
Status DeregisterBuffer(const abi::cublasMpGrid& grid, void* ptr);

// Whether this rank registered the buffer with a grid of the same communicator.
bool IsRegistered(const abi::cublasMpGrid& grid, const void* ptr);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_HANDLES_BUFFERS_H_
