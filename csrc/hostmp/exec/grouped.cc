#include "csrc/hostmp/handles/grouped.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#include "csrc/base/float_state.h"
#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/gemm/gemm_dispatch.h"
#include "csrc/hostmp/handles/bound_threads.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/tiling/tiling.h"

namespace jaxmp::hostmp {
namespace {

constexpr int64_t kLine = 64;              // of the cache
constexpr int64_t kLargestTile = 1 << 18;  // elements of d
constexpr int64_t kSmallestTile = 1 << 12;
constexpr int64_t kTilesPerThread = 4;

struct Job {
  GroupedProduct product;
  abi::cudaDataType_t sums;
  std::vector<Product> tiles;  // c is the tile's place in d; of k = 0 it becomes zero
  int64_t scratch_bytes = 0, sums_bytes = 0;
  FloatState state = FloatState::Current();
  std::atomic<size_t> next{0}, left{0};
  std::mutex mutex;
  std::condition_variable done;
};

KernelChoice KernelFor(const Job& job, const Product& tile) {
  const abi::cudaDataType_t type = job.product.type;
  return KernelOf({type, type, tile.trans_a, tile.n, job.product.is_fixed_order, /*is_alpha_one=*/true});
}

// ---- the tiles

template <typename Pointer>
Pointer At(Pointer from, abi::cudaDataType_t type, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(from) + BytesOf(type, elements);
}

// Of one product; column-major, as ldb and ldc tell.
void Cut(const Product& whole, int64_t target, Job* job) {
  if (whole.m == 0 || whole.n == 0) return;
  const int64_t pieces = CeilDiv(whole.m * whole.n, target), row_pieces = CountRowPieces(whole.m, whole.n, pieces);
  const int64_t rows = RoundUp(CeilDiv(whole.m, row_pieces), kRowUnit);
  const int64_t cols = RoundUp(CeilDiv(whole.n, CeilDiv(pieces, row_pieces)), kColUnit);
  const abi::cudaDataType_t type = job->product.type;
  for (int64_t col = 0; col < whole.n; col += cols) {
    for (int64_t row = 0; row < whole.m; row += rows) {
      Product tile = whole;
      tile.m = std::min(rows, whole.m - row);
      tile.n = std::min(cols, whole.n - col);
      tile.c = At(whole.c, job->product.out, col * whole.ldc + row);
      if (tile.k > 0) {
        tile.a = At(whole.a, type, whole.trans_a == abi::CUBLAS_OP_N ? row : row * whole.lda);
        tile.b = At(whole.b, type, whole.trans_b == abi::CUBLAS_OP_N ? col * whole.ldb : col);
      }
      job->tiles.push_back(tile);
    }
  }
}

// Row-major d = x w is column-major d^T = w^T x^T, and d = x^T w is d^T = w^T x.
void CutGroups(Job* job) {
  const GroupedProduct& p = job->product;
  const int64_t share = p.batch * p.n * (p.is_contraction ? p.groups * p.k : p.m);
  const int64_t target = std::clamp(share / (kTilesPerThread * machine_threads()), kSmallestTile, kLargestTile);
  const auto plain = abi::CUBLAS_OP_N, transposed = abi::CUBLAS_OP_T;
  for (int64_t index = 0; index < p.batch; ++index) {
    const void* const x = At(p.x, p.type, p.has_x_batch ? index * p.m * p.k : 0);
    const int64_t size_of_w = p.is_contraction ? p.m * p.n : p.groups * p.k * p.n;
    const void* const w = At(p.w, p.type, p.has_w_batch ? index * size_of_w : 0);
    void* const d = At(p.d, p.out, index * (p.is_contraction ? p.groups * p.k * p.n : p.m * p.n));
    const int32_t* const bounds = p.bounds + (p.has_bounds_batch ? index * (p.groups + 1) : 0);
    const auto add_rows = [&](int64_t first, int64_t last, const void* weights) {
      const int64_t ld = p.is_transposed ? p.k : p.n;
      Cut({p.is_transposed ? transposed : plain, plain, p.n, last - first, weights ? p.k : 0, weights, ld,
           At(x, p.type, first * p.k), p.k, At(d, p.out, first * p.n), p.n},
          target, job);
    };
    int64_t first = 0;  // row that no group before has
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t begin = std::clamp<int64_t>(bounds[group], first, p.m);
      const int64_t end = std::clamp<int64_t>(bounds[group + 1], begin, p.m);
      if (p.is_contraction) {
        Cut({plain, transposed, p.n, p.k, end - begin, At(w, p.type, begin * p.n), p.n, At(x, p.type, begin * p.k), p.k,
             At(d, p.out, group * p.k * p.n), p.n},
            target, job);
      } else {
        add_rows(first, begin, nullptr);
        add_rows(begin, end, At(w, p.type, group * p.k * p.n));
      }
      first = end;
    }
    if (!p.is_contraction) add_rows(first, p.m, nullptr);
  }
}

// ---- the work

void RunTile(const Job& job, const Product& tile, char* memory) {
  const abi::cudaDataType_t out = job.product.out;
  const auto column = [&](int64_t col) { return At(tile.c, out, col * tile.ldc); };
  if (tile.k == 0) {
    for (int64_t col = 0; col < tile.n; ++col) std::memset(column(col), 0, static_cast<size_t>(BytesOf(out, tile.m)));
    return;
  }
  Product sums = tile;
  if (out != job.sums) sums.c = memory, sums.ldc = tile.m;
  Multiply(KernelFor(job, tile), {sums}, 1.0, /*adds=*/false, memory + job.sums_bytes);
  if (out == job.sums) return;
  for (int64_t col = 0; col < tile.n; ++col) {
    const float* const from = reinterpret_cast<const float*>(memory) + col * tile.m;
    out == abi::CUDA_R_16BF ? Downconvert(from, reinterpret_cast<BFloat16*>(column(col)), tile.m)
                            : Downconvert(from, reinterpret_cast<Float16*>(column(col)), tile.m);
  }
}

using Area = std::unique_ptr<char, void (*)(void*)>;

Area MakeArea(const Job& job) {
  const auto bytes = static_cast<size_t>(RoundUp(job.sums_bytes + job.scratch_bytes + kLine, kLine));
  Area area(static_cast<char*>(std::aligned_alloc(kLine, bytes)), std::free);
  if (!area) throw std::bad_alloc();
  return area;
}

// A thread that comes late finds nothing left, and touches no array.
void Work(Job& job, const Area& area) noexcept {
  const ScopedFloatState state(job.state);
  for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tiles.size();) {
    RunTile(job, job.tiles[i], area.get());
    if (job.left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    const std::lock_guard<std::mutex> lock(job.mutex);
    job.done.notify_all();
  }
}

void CallHelpers(const std::shared_ptr<Job>& job, int most_threads) {
  double operations = 0;
  for (const Product& x : job->tiles) operations += 2.0 * static_cast<double>(x.m) * static_cast<double>(x.n * x.k);
  const int64_t tiles = static_cast<int64_t>(job->tiles.size());
  const int64_t threads = std::min<int64_t>({tiles, machine_threads(), int64_t{most_threads}});
  if (threads < 2 || operations < kWorthSharing) return;
  BoundThreads(most_threads).Schedule(threads - 1, [job] {
    try {
      Work(*job, MakeArea(*job));
    } catch (const std::bad_alloc&) {  // the other threads take its tiles
    }
  });
}

}  // namespace

Status MultiplyGroups(const GroupedProduct& product, int most_threads) {
  const abi::cudaDataType_t sums = AccumulatorOf(product.type);
  if (product.out != sums && !(sums == abi::CUDA_R_32F && Facts(product.out).is_16bit)) {
    return InvalidArgument("jaxmp: a grouped product of ", NameOf(product.type), " has no result of ",
                           NameOf(product.out));
  }
  try {
    const auto job = std::make_shared<Job>();
    job->product = product;
    job->sums = sums;
    CutGroups(job.get());
    for (const Product& tile : job->tiles) {
      if (tile.k == 0) continue;
      const int64_t bytes = product.out == sums ? 0 : RoundUp(BytesOf(sums, tile.m * tile.n), kLine);
      job->sums_bytes = std::max(job->sums_bytes, bytes);
      job->scratch_bytes = std::max(job->scratch_bytes, ScratchBytes(KernelFor(*job, tile), tile.m, tile.n, tile.k));
    }
    job->left = job->tiles.size();
    const Area area = MakeArea(*job);  // if this throws, no other thread uses the caller's arrays yet
    try {
      CallHelpers(job, most_threads);
    } catch (const std::exception&) {  // without help it only takes longer
    }
    Work(*job, area);
    std::unique_lock<std::mutex> lock(job->mutex);
    job->done.wait(lock, [&] { return job->left.load(std::memory_order_acquire) == 0; });
    return {};
  } catch (const std::exception& exception) {
    return ResourceExhausted("jaxmp: ", exception.what());
  }
}

}  // namespace jaxmp::hostmp
