// Memory that the processes of one machine share: each writes to its own arena and reads the others'.
//
// An arena is a memfd, which no file system limits and which goes with the last process that maps it. Others open it as
// /proc/<pid>/fd/<fd>. It is as large as the machine's memory, and takes what has been written to.
#ifndef JAXMP_SHARED_MEMORY_ARENA_H_
#define JAXMP_SHARED_MEMORY_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/base/status.h"

namespace jaxmp {

// This process's arena, which is made when it is first asked for: "<pid> <fd> <bytes> <number>" for ShareArena of the
// others. The number is random, and written at its beginning.
StatusOr<std::string> OwnArena();

// Maps the arena that `process` of the job has described; what was mapped for it before goes.
Status ShareArena(int process, const std::string& described);

// A block of this process's arena: `bytes` to write at `data`, until ReleaseBlock has been called `readers` times.
struct Block {
  uint64_t token = 0;  // what a reader finds it by
  char* data = nullptr;
};
StatusOr<Block> AllocateBlock(size_t bytes, uint32_t readers);

// The bytes of a block of `process` (this one's own number is `process` too). It has to have `bytes`.
StatusOr<const char*> ReadBlock(int process, uint64_t token, size_t bytes);
void ReleaseBlock(int process, uint64_t token);

// Bytes of this process's arena that blocks take, and that any block has taken.
struct ArenaUse {
  size_t used, touched;
};
ArenaUse OwnArenaUse();

}  // namespace jaxmp

#endif  // JAXMP_SHARED_MEMORY_ARENA_H_
