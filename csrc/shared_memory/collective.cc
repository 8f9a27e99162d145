#include "csrc/shared_memory/collective.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/barrier/barrier.h"
#include "csrc/shared_memory/arena.h"

namespace jaxmp {
namespace {

// Bytes of a sum that are made at a time: they stay in the first cache while each rank's are added.
constexpr size_t kSummed = 16 << 10;

// Of an empty array there may be no address.
void Copy(char* to, const char* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// The devices of a call's group.
struct Members {
  const std::vector<int64_t>& positions;
  size_t own;              // place among `positions`
  std::vector<size_t> at;  // by rank: place among `positions`
};

Members MembersOf(const SharedCollective& call, int64_t position) {
  const CallSignature& signature = *call.signature;
  Members members{
      signature.members[static_cast<size_t>(signature.groups[static_cast<size_t>(position)])].positions, 0, {}};
  members.at.resize(members.positions.size());
  for (size_t i = 0; i < members.positions.size(); ++i) {
    if (members.positions[i] == position) members.own = i;
    members.at[static_cast<size_t>(call.ranks[static_cast<size_t>(members.positions[i])])] = i;
  }
  return members;
}

Status CheckArrays(const SharedCollective& call, size_t nranks, const CollectiveArrays& arrays) {
  const size_t whole = call.sums ? arrays.operand_bytes : arrays.result_bytes;
  const size_t part = call.sums ? arrays.result_bytes : arrays.operand_bytes;
  const bool is_cut = part % call.outer == 0 && part / call.outer % arrays.element_bytes == 0;
  if (whole == part * nranks && is_cut) return {};
  return InvalidArgument("jaxmp: a collective of ", nranks, " ranks has ", part, " bytes on one side and ", whole,
                         " on the other");
}

// What the others need of the operand: of a reduce-scatter all but this rank's part of the sum.
void Write(const SharedCollective& call, size_t rank, size_t nranks, const CollectiveArrays& arrays, char* block) {
  if (!call.sums) {
    Copy(block, arrays.operand, arrays.operand_bytes);
    return;
  }
  const size_t piece = arrays.result_bytes / call.outer, row = piece * nranks;
  for (size_t i = 0; i < call.outer; ++i) {
    const size_t begin = i * row, own = begin + rank * piece;
    Copy(block + begin, arrays.operand + begin, own - begin);
    Copy(block + own + piece, arrays.operand + own + piece, row - rank * piece - piece);
  }
}

// `blocks` are by rank; this rank's is its operand.
void Gather(const SharedCollective& call, const std::vector<const char*>& blocks, const CollectiveArrays& arrays) {
  const size_t piece = arrays.operand_bytes / call.outer;
  char* to = arrays.result;
  for (size_t i = 0; i < call.outer; ++i) {
    for (const char* block : blocks) {
      Copy(to, block + i * piece, piece);
      to += piece;
    }
  }
}

void Sum(const SharedCollective& call, size_t rank, const std::vector<const char*>& blocks,
         const CollectiveArrays& arrays) {
  const size_t piece = arrays.result_bytes / call.outer, row = piece * blocks.size();
  for (size_t i = 0; i < call.outer; ++i) {
    for (size_t begin = 0; begin < piece; begin += kSummed) {
      const size_t from = i * row + rank * piece + begin, bytes = std::min(kSummed, piece - begin);
      char* sum = arrays.result + i * piece + begin;
      Copy(sum, blocks[0] + from, bytes);
      for (size_t other = 1; other < blocks.size(); ++other) {
        arrays.add(sum, sum, blocks[other] + from, bytes / arrays.element_bytes);
      }
    }
  }
}

}  // namespace

Status CheckCollective(const SharedCollective& call) {
  const CallSignature& signature = *call.signature;
  const Status wrong = InvalidArgument("jaxmp: the ranks of a collective must count from 0 in each group");
  if (call.ranks.size() != signature.groups.size() || call.outer == 0) return wrong;
  for (const CallSignature::Group& group : signature.members) {
    std::vector<bool> is_there(group.positions.size());
    for (int64_t position : group.positions) {
      const int64_t rank = call.ranks[static_cast<size_t>(position)];
      if (rank < 0 || rank >= static_cast<int64_t>(is_there.size()) || is_there[static_cast<size_t>(rank)])
        return wrong;
      is_there[static_cast<size_t>(rank)] = true;
    }
  }
  return {};
}

void RunCollective(const std::shared_ptr<const SharedCollective>& call, const Origin& origin, int64_t position,
                   const CollectiveArrays& arrays, std::function<void(const Status&)> done) {
  if (position < 0 || position >= static_cast<int64_t>(call->ranks.size())) {
    done(InvalidArgument(call->signature->call, ": the mesh has no position ", position));
    return;
  }
  const size_t rank = static_cast<size_t>(call->ranks[static_cast<size_t>(position)]);
  const Members members = MembersOf(*call, position);
  const size_t nranks = members.positions.size();
  Status checked = CheckArrays(*call, nranks, arrays);
  StatusOr<Block> block =
      checked.ok() ? AllocateBlock(arrays.operand_bytes, static_cast<uint32_t>(nranks - 1)) : StatusOr<Block>(checked);
  if (!block.ok()) {
    done(block.status());
    return;
  }
  if (block->token != 0) Write(*call, rank, nranks, arrays, block->data);
  ArriveWithToken(call->signature, origin, position, block->token,
                  [call, position, rank, arrays, done = std::move(done)](const Status& status,
                                                                         const std::vector<uint64_t>& tokens) {
                    if (!status.ok()) {
                      done(status);
                      return;
                    }
                    const Members members = MembersOf(*call, position);
                    std::vector<const char*> blocks;
                    for (size_t at : members.at) {
                      if (at == members.own && tokens[at] != 0) {
                        blocks.push_back(arrays.operand);
                        continue;
                      }
                      const auto process = call->signature->processes[static_cast<size_t>(members.positions[at])];
                      StatusOr<const char*> found =
                          ReadBlock(static_cast<int>(process), tokens[at], arrays.operand_bytes);
                      if (!found.ok()) {
                        done(found.status());
                        return;
                      }
                      blocks.push_back(*found);
                    }
                    call->sums ? Sum(*call, rank, blocks, arrays) : Gather(*call, blocks, arrays);
                    for (size_t at = 0; at < tokens.size(); ++at) {
                      if (at == members.own) continue;
                      const auto process = call->signature->processes[static_cast<size_t>(members.positions[at])];
                      ReleaseBlock(static_cast<int>(process), tokens[at]);
                    }
                    done({});
                  });
}

}  // namespace jaxmp
