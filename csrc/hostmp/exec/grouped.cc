#include "csrc/hostmp/handles/grouped.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/gemm/scaled_gemm.h"
#include "csrc/hostmp/tiling/tiling.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kLine = 64;              // bytes of a cache line
constexpr int64_t kLargestTile = 1 << 18;  // elements of d
constexpr int64_t kSmallestTile = 1 << 12;
constexpr int64_t kTilesPerThread = 4;
// Rows of one group from several ranks are multiplied together up to this many rows, so that its matrix is read once.
constexpr int64_t kMostTogether = 256;
constexpr int64_t kMostCopied = 4 << 20;  // bytes of such rows, for each thread

std::mutex rows_mutex;
GroupRows rows_of_groups;

constexpr auto kPlain = abi::CUBLAS_OP_N, kTransposed = abi::CUBLAS_OP_T;

template <typename Pointer>
auto At(Pointer from, abi::cudaDataType_t type, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(from) + BytesOf(type, elements);
}

// Adjacent rows of one group in a rank's memory: in x, and in d (in w for a contraction).
struct Rows {
  const char *x, *w;
  char* d;
  int64_t count;
};

// A part of column-major d^T: of w^T x^T or (contraction) of w^T x over the group's rows.
struct GroupTile {
  const char* w;   // matrices of the rank that has the group's; null for a contraction and for rows of no group
  char* d;         // the group's matrix in a contraction, else null
  int64_t matrix;  // the element of w at which the group's matrix begins
  int64_t row, nrows, col, ncols;
  size_t first, last;  // the rows, in rows_: columns of d^T or (contraction) the terms of the sum
  int64_t depth;       // terms of a sum; without any, the tile becomes zero
};

class GroupedWork final : public SharedWork {
 public:
  explicit GroupedWork(std::vector<const GroupedProduct*> ranks)
      : ranks_(std::move(ranks)), p_(*ranks_[0]), sums_(AccumulatorOf(p_.type)) {
    int64_t rows = 0;
    for (int64_t index = 0; index < p_.batch; ++index) {
      for (const GroupedProduct* rank : ranks_) rows += Within(*rank, Bounds(*rank, index)[groups()], 0);
    }
    operations_ = 2.0 * static_cast<double>(rows) * static_cast<double>(p_.n) * static_cast<double>(p_.k);
    for (int64_t index = 0; index < p_.batch; ++index) CutGroups(index);
    for (const GroupTile& tile : tiles_) Measure(tile);
    const int64_t bytes = area_bytes() * machine_threads();
    if (bytes == 0) return;
    areas_.reset(static_cast<char*>(std::aligned_alloc(kLine, static_cast<size_t>(bytes))));
    if (!areas_) throw std::bad_alloc();
  }

  size_t pieces() const override { return tiles_.size(); }
  double operations() const override { return operations_; }

  void Run(size_t piece, int area) override {
    const GroupTile& tile = tiles_[piece];
    if (tile.depth == 0) return FillZero(tile);
    char* const sums = areas_.get() + area * area_bytes();
    char* const scratch = sums + sums_bytes_;
    char* const copied = scratch + scratch_bytes_;
    const bool is_in_d = IsSummedInD(tile);
    char* const c = !is_in_d ? sums : tile.d ? InMatrix(tile) : InRows(tile, rows_[tile.first]);
    const int64_t ldc = is_in_d ? p_.n : tile.nrows;
    if (const KernelChoice kernel = KernelFor(tile); kernel.conversion != Conversion::kNone) {
      ScaledGemm(kernel, {DecodedProductOf(tile, c, ldc)}, 1.0, /*adds=*/false, scratch);
    } else {
      KSegments segments = p_.is_contraction ? SegmentsOf(tile, copied) : KSegments{ProductOf(tile, copied)};
      for (Product& segment : segments) segment.c = c, segment.ldc = ldc;
      Multiply(kernel, segments, 1.0, /*adds=*/false, scratch);
    }
    if (is_in_d) return;
    if (tile.d) return Store(c, tile.nrows, tile.ncols, InMatrix(tile));
    char* from = c;
    for (size_t i = tile.first; i < tile.last; ++i) {
      Store(from, tile.nrows, rows_[i].count, InRows(tile, rows_[i]));
      from += BytesOf(sums_, rows_[i].count * tile.nrows);
    }
  }

 private:
  int64_t groups() const { return p_.matrices * static_cast<int64_t>(ranks_.size()); }
  int64_t area_bytes() const { return sums_bytes_ + scratch_bytes_ + copied_bytes_; }

  // ---- the tiles

  const int32_t* Bounds(const GroupedProduct& rank, int64_t index) const {
    return rank.bounds + (p_.has_bounds_batch ? index * (groups() + 1) : 0);
  }

  static int64_t Within(const GroupedProduct& rank, int64_t row, int64_t first) {
    return std::clamp(row, first, rank.m);
  }

  Rows RowsOf(const GroupedProduct& rank, int64_t index, int64_t begin, int64_t end) const {
    const int64_t x = (p_.has_x_batch ? index * p_.m : 0) + begin, d = index * p_.m + begin;
    const int64_t w = (p_.has_w_batch ? index * p_.m : 0) + begin;
    return {At(rank.x, p_.type, x * p_.k), p_.is_contraction ? At(rank.w, p_.type, w * p_.n) : nullptr,
            p_.is_contraction ? nullptr : At(rank.d, p_.out, d * p_.n), end - begin};
  }

  void CutGroups(int64_t index) {
    std::vector<int64_t> ends(ranks_.size(), 0);  // of the previous groups, by rank
    int64_t largest = 0, all = 0;
    for (int64_t group = 0; group < groups(); ++group) {
      std::vector<Rows> rows;
      for (size_t i = 0; i < ranks_.size(); ++i) {
        const GroupedProduct& rank = *ranks_[i];
        const int64_t begin = Within(rank, Bounds(rank, index)[group], ends[i]);
        const int64_t end = Within(rank, Bounds(rank, index)[group + 1], begin);
        if (end > begin) rows.push_back(RowsOf(rank, index, begin, end));
        LeaveZero(rank, index, ends[i], begin);
        ends[i] = end;
      }
      int64_t of_group = 0;
      for (const Rows& part : rows) of_group += part.count;
      largest = std::max(largest, of_group), all += of_group;
      const GroupedProduct& owner = *ranks_[static_cast<size_t>(group / p_.matrices)];
      const int64_t matrix = group % p_.matrices, size = p_.k * p_.n;
      if (p_.is_contraction) {
        CutContraction(rows, At(owner.d, p_.out, (index * p_.matrices + matrix) * size));
      } else {
        CutRows(rows, static_cast<const char*>(owner.w), ((p_.has_w_batch ? index * p_.matrices : 0) + matrix) * size);
      }
    }
    for (size_t i = 0; i < ranks_.size(); ++i) LeaveZero(*ranks_[i], index, ends[i], p_.m);
    if (groups() < 2) return;
    const std::scoped_lock lock(rows_mutex);
    rows_of_groups.largest += static_cast<double>(largest);
    rows_of_groups.mean += static_cast<double>(all) / static_cast<double>(groups());
  }

  // Makes the tiles of rows that belong to no group: zeros.
  void LeaveZero(const GroupedProduct& rank, int64_t index, int64_t begin, int64_t end) {
    if (p_.is_contraction || begin == end) return;
    const Rows rows = RowsOf(rank, index, begin, end);
    CutTogether(&rows, 1, nullptr, 0);
  }

  void CutRows(const std::vector<Rows>& rows, const char* w, int64_t matrix) {
    const int64_t most = std::min(kMostTogether, kMostCopied / std::max<int64_t>(1, BytesOf(p_.type, p_.k)));
    for (size_t first = 0, next; first < rows.size(); first = next) {
      int64_t count = rows[first].count;
      for (next = first + 1; next < rows.size() && count + rows[next].count <= most; ++next) count += rows[next].count;
      CutTogether(&rows[first], next - first, w, matrix);
    }
  }

  // Cuts rows of one or more ranks into tiles; rows of several ranks stay together.
  void CutTogether(const Rows* rows, size_t ranks, const char* w, int64_t matrix) {
    int64_t count = 0;
    for (size_t i = 0; i < ranks; ++i) count += rows[i].count;
    const int64_t depth = w ? p_.k : 0, pieces = CountPieces(p_.n, count, depth);
    const int64_t row_pieces = ranks > 1 ? pieces : CountRowPieces(p_.n, count, pieces);
    const int64_t ncols = ranks > 1 ? count : RoundUp(CeilDiv(count, CeilDiv(pieces, row_pieces)), kColUnit);
    for (int64_t col = 0; col < count; col += ncols) {
      const size_t first = rows_.size();
      rows_.insert(rows_.end(), rows, rows + ranks);
      if (ranks == 1) {
        Rows& part = rows_.back();
        part = {At(part.x, p_.type, col * p_.k), nullptr, At(part.d, p_.out, col * p_.n), std::min(ncols, count - col)};
      }
      CutColumn({w, nullptr, matrix, 0, 0, 0, std::min(ncols, count - col), first, rows_.size(), depth}, row_pieces);
    }
  }

  void CutContraction(const std::vector<Rows>& rows, char* d) {
    const size_t first = rows_.size();
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    int64_t depth = 0;
    for (const Rows& part : rows) depth += part.count;
    const int64_t pieces = CountPieces(p_.n, p_.k, depth), row_pieces = CountRowPieces(p_.n, p_.k, pieces);
    const int64_t ncols = RoundUp(CeilDiv(p_.k, CeilDiv(pieces, row_pieces)), kColUnit);
    for (int64_t col = 0; col < p_.k; col += ncols) {
      CutColumn({nullptr, d, 0, 0, 0, col, std::min(ncols, p_.k - col), first, rows_.size(), depth}, row_pieces);
    }
  }

  void CutColumn(GroupTile tile, int64_t row_pieces) {
    const int64_t nrows = RoundUp(CeilDiv(p_.n, row_pieces), kRowUnit);
    for (tile.row = 0; tile.row < p_.n; tile.row += nrows) {
      tile.nrows = std::min(nrows, p_.n - tile.row);
      tiles_.push_back(tile);
    }
  }

  // Counts tiles by operations, so that a group with most of the rows is cut into most of the tiles.
  int64_t CountPieces(int64_t nrows, int64_t ncols, int64_t depth) const {
    const double each = operations_ / static_cast<double>(2 * kTilesPerThread * machine_threads());
    const double target = each / static_cast<double>(std::max<int64_t>(1, depth));
    const auto area = static_cast<int64_t>(std::min(target, static_cast<double>(kLargestTile)));
    return std::max<int64_t>(1, CeilDiv(nrows * ncols, std::max(area, kSmallestTile)));
  }

  void Measure(const GroupTile& tile) {
    if (tile.depth == 0) return;
    const auto grow = [](int64_t* most, int64_t bytes) { *most = std::max(*most, RoundUp(bytes, kLine)); };
    if (!IsSummedInD(tile)) grow(&sums_bytes_, BytesOf(sums_, tile.nrows * tile.ncols));
    const KernelChoice kernel = KernelFor(tile);
    if (kernel.conversion != Conversion::kNone) {
      return grow(&scratch_bytes_, ScaledGemmScratch(kernel, false, tile.nrows, tile.ncols, tile.depth));
    }
    grow(&scratch_bytes_, ScratchBytes(kernel, tile.nrows, tile.ncols, tile.depth));
    const auto cuts = static_cast<int64_t>(tile.last - tile.first) - 1;
    if (cuts == 0) return;
    grow(&copied_bytes_, BytesOf(p_.type, p_.is_contraction ? cuts * KUnit(kernel.kernel) * (tile.nrows + tile.ncols)
                                                            : tile.ncols * p_.k));
  }

  // ---- the work

  KernelChoice KernelFor(const GroupTile& tile) const {
    const auto trans_a = p_.is_transposed ? kTransposed : kPlain;
    return KernelOf({p_.type_w, p_.type, trans_a, tile.ncols, p_.is_fixed_order, /*is_alpha_one=*/true});
  }

  bool IsSummedInD(const GroupTile& tile) const {
    return p_.out == sums_ && (p_.is_contraction || tile.last - tile.first == 1);
  }

  char* InMatrix(const GroupTile& tile) const { return At(tile.d, p_.out, tile.col * p_.n + tile.row); }
  char* InRows(const GroupTile& tile, const Rows& rows) const { return At(rows.d, p_.out, tile.row); }

  // The element of w at which the tile's part of the matrix begins.
  int64_t FirstOf(const GroupTile& tile) const { return tile.matrix + (p_.is_transposed ? tile.row * p_.k : tile.row); }

  // Rows times the matrix of their group. Rows of several ranks are first copied one after the other to `copied`.
  Product ProductOf(const GroupTile& tile, char* copied) const {
    const int64_t ld = p_.is_transposed ? p_.k : p_.n;
    const char* x = rows_[tile.first].x;
    if (tile.last - tile.first > 1) {
      x = copied;
      for (size_t i = tile.first; i < tile.last; ++i) {
        const int64_t bytes = BytesOf(p_.type, rows_[i].count * p_.k);
        std::memcpy(copied, rows_[i].x, static_cast<size_t>(bytes));
        copied += bytes;
      }
    }
    return {p_.is_transposed ? kTransposed : kPlain,
            kPlain,
            tile.nrows,
            tile.ncols,
            p_.k,
            At(tile.w, p_.type, FirstOf(tile)),
            ld,
            x,
            p_.k,
            nullptr,
            0};
  }

  // The same for a narrow w, which is decoded one K block at a time. Rows of several ranks are read in place.
  ScaledProduct DecodedProductOf(const GroupTile& tile, char* c, int64_t ldc) const {
    const int64_t ld = p_.is_transposed ? p_.k : p_.n;
    const ScaledOperand w = {p_.type_w, tile.w, FirstOf(tile), ld, p_.is_transposed, {}, 0, 0, 0, 0};
    ScaledProduct product = {tile.nrows, tile.ncols, p_.k, w, {}, c, ldc};
    for (size_t i = tile.first; i < tile.last; ++i) {
      product.b.push_back({rows_[i].count, {p_.type, rows_[i].x, 0, p_.k, true, {}, 0, 0, 0, 0}});
    }
    return product;
  }

  // The terms of a contraction: the rows of each rank, one rank after the other, cut at whole units.
  KSegments SegmentsOf(const GroupTile& tile, char* copied) const {
    std::vector<int64_t> ends;
    for (size_t i = tile.first; i < tile.last; ++i) ends.push_back((i > tile.first ? ends.back() : 0) + rows_[i].count);
    const auto product_of = [&](size_t i, int64_t begin, int64_t end) {
      const Rows& rows = rows_[tile.first + i];
      const int64_t row = begin - (ends[i] - rows.count);
      return Product{kPlain,
                     kTransposed,
                     tile.nrows,
                     tile.ncols,
                     end - begin,
                     At(rows.w, p_.type, row * p_.n + tile.row),
                     p_.n,
                     At(rows.x, p_.type, row * p_.k + tile.col),
                     p_.k,
                     nullptr,
                     0};
    };
    return CutAtUnits(ends, KUnit(KernelFor(tile).kernel), product_of, copied);
  }

  void FillZero(const GroupTile& tile) const {
    const auto bytes = static_cast<size_t>(BytesOf(p_.out, tile.nrows));
    char* const to = tile.d ? InMatrix(tile) : InRows(tile, rows_[tile.first]);
    for (int64_t col = 0; col < tile.ncols; ++col) std::memset(At(to, p_.out, col * p_.n), 0, bytes);
  }

  // Stores the sums of `ncols` columns in d. Columns of d are n elements apart.
  void Store(char* from, int64_t nrows, int64_t ncols, char* to) const {
    hostmp::Finish finish{};
    finish.epilog = FindEpilog(abi::CUBLASMP_MATMUL_EPILOGUE_DEFAULT);
    finish.rows = nrows, finish.cols = ncols;
    finish.z = from, finish.ldz = nrows;
    finish.d = to, finish.ldd = p_.n;
    FinishTile(finish, sums_, p_.out);
  }

  const std::vector<const GroupedProduct*> ranks_;
  const GroupedProduct& p_;  // the first rank's, for everything that all ranks share
  const abi::cudaDataType_t sums_;
  double operations_ = 0;
  std::vector<Rows> rows_;
  std::vector<GroupTile> tiles_;
  int64_t sums_bytes_ = 0, scratch_bytes_ = 0, copied_bytes_ = 0;
  std::unique_ptr<char, void (*)(void*)> areas_{nullptr, std::free};  // by area
};

struct GroupedRank final : RankCall {
  explicit GroupedRank(const GroupedProduct& product) : product(product) {}

  // Everything that must be equal on all ranks.
  auto Key() const {
    const GroupedProduct& p = product;
    return std::make_tuple(p.is_contraction, p.is_transposed, p.is_fixed_order, p.type, p.type_w, p.out, p.batch,
                           p.matrices, p.m, p.k, p.n, p.has_x_batch, p.has_w_batch, p.has_bounds_batch);
  }

  StatusOr<std::unique_ptr<SharedWork>> Share(const std::vector<const RankCall*>& ranks) const override {
    std::vector<const GroupedProduct*> products;
    for (const RankCall* rank : ranks) {
      const auto& other = *static_cast<const GroupedRank*>(rank);
      if (other.Key() != Key()) return FailedPrecondition("jaxmp: ranks disagree on a grouped product");
      products.push_back(&other.product);
    }
    return std::unique_ptr<SharedWork>(std::make_unique<GroupedWork>(std::move(products)));
  }

  const GroupedProduct product;
};

}  // namespace

GroupRows TakeGroupRows() {
  const std::scoped_lock lock(rows_mutex);
  return std::exchange(rows_of_groups, {});
}

Status MultiplyGroups(const GroupedProduct& product, Stream& stream, int rank, int nranks) {
  const abi::cudaDataType_t sums = AccumulatorOf(product.type);
  const bool is_summed = product.out == sums && product.type != abi::CUDA_R_32I;
  if (!is_summed && !(sums == abi::CUDA_R_32F && Facts(product.out).is_16bit)) {
    return InvalidArgument("jaxmp: a grouped product of ", NameOf(product.type), " has no result of ",
                           NameOf(product.out));
  }
  const bool is_wide = !Facts(product.type).is_low_precision;
  const bool is_decoded =
      is_wide && sums == abi::CUDA_R_32F && Facts(product.type_w).is_low_precision && !product.is_contraction;
  const bool is_one_type = product.type_w == product.type && (is_wide || product.type == abi::CUDA_R_8I);
  if (!is_one_type && !is_decoded) {
    return InvalidArgument("jaxmp: a grouped product of ", NameOf(product.type), " takes no ", NameOf(product.type_w));
  }
  Arrival arrival;
  arrival.stream = &stream;
  arrival.call = std::make_unique<GroupedRank>(product);
  Arrive(std::move(arrival), rank, nranks);
  return {};
}

}  // namespace jaxmp::hostmp
