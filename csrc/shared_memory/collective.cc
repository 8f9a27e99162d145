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

// An empty array may have no address.
void Copy(char* to, const char* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

size_t RankOf(const SharedCollective& call, int64_t position) {
  return static_cast<size_t>(call.ranks[static_cast<size_t>(position)]);
}

// The devices of the group of one, by their places in the signature.
const std::vector<int64_t>& PositionsOf(const SharedCollective& call, int64_t position) {
  const CallSignature& signature = *call.signature;
  return signature.members[static_cast<size_t>(signature.groups[static_cast<size_t>(position)])].positions;
}

// The bytes that a rank writes.
size_t BytesOf(const SharedCollective& call, size_t rank, const CollectiveArrays& arrays) {
  const Picks& picks = arrays.picks;
  return call.picks ? static_cast<size_t>(picks.written[rank]) * picks.row_bytes : arrays.operand_bytes;
}

Status CheckPicks(const SharedCollective& call, size_t nranks, const CollectiveArrays& arrays) {
  const Picks& picks = arrays.picks;
  const auto are_in = [&](int64_t first, int64_t count, size_t bytes) {
    return first >= 0 && count >= 0 && static_cast<size_t>(first + count) * picks.row_bytes <= bytes;
  };
  bool is_right = true;
  for (size_t rank = 0; rank < nranks; ++rank) {
    is_right = is_right && are_in(0, picks.written[rank], arrays.operand_bytes);
  }
  for (const int32_t* pick = picks.table; is_right && pick != picks.table + 4 * picks.npicks; pick += 4) {
    is_right = pick[0] >= 0 && static_cast<size_t>(pick[0]) < nranks && are_in(pick[3], pick[2], arrays.result_bytes) &&
               are_in(pick[1], pick[2], BytesOf(call, static_cast<size_t>(pick[0]), arrays));
  }
  if (is_right) return {};
  return InvalidArgument(call.signature->call, ": rows are taken that no rank has, or to where the result has none");
}

Status CheckResult(const SharedCollective& call, int64_t position, const CollectiveArrays& arrays) {
  JAXMP_ASSIGN_OR_RETURN(const size_t nranks, RanksOf(call, position));
  if (call.picks) return CheckPicks(call, nranks, arrays);
  const size_t whole = call.sums ? arrays.operand_bytes : arrays.result_bytes;
  const size_t part = call.sums ? arrays.result_bytes : arrays.operand_bytes;
  if (whole == part * nranks) return {};
  return InvalidArgument("jaxmp: a collective of ", nranks, " ranks has ", part, " bytes on one side and ", whole,
                         " on the other");
}

// Writes what the other ranks need of the operand: in a reduce-scatter everything but this rank's part of the sum.
void Write(const SharedCollective& call, size_t rank, size_t nranks, const CollectiveArrays& arrays, char* block) {
  if (!call.sums) {
    Copy(block, arrays.operand, BytesOf(call, rank, arrays));
    return;
  }
  const size_t row = arrays.operand_bytes / call.outer, piece = row / nranks;
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

void Pick(const std::vector<const char*>& blocks, const CollectiveArrays& arrays) {
  const auto bytes = [&](int32_t rows) { return static_cast<size_t>(rows) * arrays.picks.row_bytes; };
  for (size_t i = 0; i < arrays.picks.npicks; ++i) {
    const int32_t* pick = arrays.picks.table + 4 * i;
    Copy(arrays.result + bytes(pick[3]), blocks[static_cast<size_t>(pick[0])] + bytes(pick[1]), bytes(pick[2]));
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

StatusOr<size_t> RanksOf(const SharedCollective& call, int64_t position) {
  if (position >= 0 && position < static_cast<int64_t>(call.ranks.size())) return PositionsOf(call, position).size();
  return InvalidArgument(call.signature->call, ": the mesh has no position ", position);
}

StatusOr<uint64_t> WriteOperand(const SharedCollective& call, int64_t position, const CollectiveArrays& arrays) {
  JAXMP_ASSIGN_OR_RETURN(const size_t nranks, RanksOf(call, position));
  if (call.picks) JAXMP_RETURN_IF_ERROR(CheckPicks(call, nranks, arrays));
  const size_t rank = RankOf(call, position), bytes = BytesOf(call, rank, arrays);
  const size_t pieces = call.outer * (call.sums ? nranks : 1);
  if (arrays.operand_bytes % pieces != 0 || arrays.operand_bytes / pieces % arrays.element_bytes != 0) {
    return InvalidArgument("jaxmp: a collective of ", nranks, " ranks has an operand of ", arrays.operand_bytes,
                           " bytes, which are to be in ", pieces, " pieces");
  }
  JAXMP_ASSIGN_OR_RETURN(const Block block, AllocateBlock(bytes, static_cast<uint32_t>(nranks - 1)));
  if (block.token != 0) Write(call, rank, nranks, arrays, block.data);
  return block.token;
}

Status ReadOperands(const SharedCollective& call, int64_t position, const CollectiveArrays& arrays,
                    const uint64_t* tokens) {
  JAXMP_RETURN_IF_ERROR(CheckResult(call, position, arrays));
  const size_t nranks = PositionsOf(call, position).size();
  std::vector<const char*> blocks(nranks);
  std::vector<int> processes(nranks);
  for (int64_t other : PositionsOf(call, position)) {
    const size_t rank = RankOf(call, other);
    processes[rank] = static_cast<int>(call.signature->processes[static_cast<size_t>(other)]);
    if (other == position && tokens[rank] != 0) {
      blocks[rank] = arrays.operand;
      continue;
    }
    JAXMP_ASSIGN_OR_RETURN(blocks[rank], ReadBlock(processes[rank], tokens[rank], BytesOf(call, rank, arrays)));
  }
  const size_t own = RankOf(call, position);
  if (call.picks) {
    Pick(blocks, arrays);
  } else {
    call.sums ? Sum(call, own, blocks, arrays) : Gather(call, blocks, arrays);
  }
  for (size_t rank = 0; rank < nranks; ++rank) {
    if (rank != own) ReleaseBlock(processes[rank], tokens[rank]);
  }
  return {};
}

void RunCollective(const std::shared_ptr<const SharedCollective>& call, const Origin& origin, int64_t position,
                   const CollectiveArrays& arrays, std::function<void(const Status&)> done) {
  const Status checked = CheckResult(*call, position, arrays);
  const StatusOr<uint64_t> token = checked.ok() ? WriteOperand(*call, position, arrays) : StatusOr<uint64_t>(checked);
  if (!token.ok()) {
    done(token.status());
    return;
  }
  ArriveWithToken(
      call->signature, origin, position, *token,
      [call, position, arrays, done = std::move(done)](Status status, const std::vector<uint64_t>& by_place) {
        if (status.ok()) {
          std::vector<uint64_t> tokens(by_place.size());
          const std::vector<int64_t>& positions = PositionsOf(*call, position);
          for (size_t i = 0; i < positions.size(); ++i) tokens[RankOf(*call, positions[i])] = by_place[i];
          status = ReadOperands(*call, position, arrays, tokens.data());
        }
        done(status);
      });
}

}  // namespace jaxmp
