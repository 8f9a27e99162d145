// Memory that the processes of one machine share: each writes to its own arena and reads the others'.
//
// An arena is a memfd, which no file system limits and which goes with the last process that maps it. Others open it as
// /proc/<pid>/fd/<fd>. Blocks are in slots, ranges of the file that are allocated and mapped when a block needs one. A
// slot is used again for blocks of about its size, and goes back when it has not been used for a while.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "csrc/base/status.h"

namespace jaxmp {

// This process's arena, which is made when it is first asked for: "<pid> <fd> <number>" for ShareArena of the others.
// The number is random, and written at its beginning.
StatusOr<std::string> DescribeLocalArena();

// Opens the arena that `process` of the job has described; what was opened for it before goes. By its own description
// this process learns its number.
Status ShareArena(int process, const std::string& described);

// A block of this process's arena: `bytes` to write at `data`, until ReleaseBlock has been called `readers` times. An
// error for no readers. If there is no memory, the token is 0, and each reader of that token gets the error.
struct Block {
  uint64_t token = 0;  // the place of the block, and which block in that place it is
  char* data = nullptr;
};
StatusOr<Block> AllocateBlock(size_t bytes, uint32_t readers);

// The bytes of a block of `process` (this one's own number is `process` too), until this process has released it as
// often as it has read it. An error where the token is of no block of `bytes`, or of an earlier one in the same place.
StatusOr<const char*> ReadBlock(int process, uint64_t token, size_t bytes);
void ReleaseBlock(int process, uint64_t token);

// Gives back memory and addresses that have not been used for so many seconds.
void TrimArenas(double unused_for);

// Bytes of this process's arena: in blocks that are in use, and in all slots.
struct ArenaUse {
  size_t used, touched;
};
ArenaUse LocalArenaUse();

}  // namespace jaxmp
