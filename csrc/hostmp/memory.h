// cublasMpMalloc and the registry of buffers.
#ifndef JAXMP_HOSTMP_MEMORY_H_
#define JAXMP_HOSTMP_MEMORY_H_

#include <cstddef>

#include "csrc/base/status.h"
#include "csrc/hostmp/objects.h"

namespace jaxmp::hostmp {

StatusOr<void*> allocate(const abi::cublasMpGrid& grid, size_t size);
Status release(const abi::cublasMpGrid& grid, void* ptr);
Status register_buffer(const abi::cublasMpGrid& grid, void* ptr, size_t size);
Status deregister_buffer(const abi::cublasMpGrid& grid, void* ptr);

// Whether this rank registered the buffer with a grid of the same communicator.
bool is_registered(const abi::cublasMpGrid& grid, const void* ptr);

}  // namespace jaxmp::hostmp

#endif  // JAXMP_HOSTMP_MEMORY_H_
