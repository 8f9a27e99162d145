#include "csrc/hostmp/kernels/int8_gemm.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "csrc/hostmp/cpu/features.h"
#include "csrc/hostmp/kernels/amx_tiles.h"
#include "csrc/hostmp/kernels/blocked_gemm.h"
#include "csrc/hostmp/kernels/transpose_lines.h"

namespace jaxmp::hostmp {
namespace {

// A stored operand from some position on; `ld` is the distance between its lines.
struct ByteView {
  const int8_t* data;
  int64_t ld;
};

// Micro-panels of op(A), with `width` rows, and of op(B), both of `words` words.
struct MicroPanels {
  const char *a, *b;
  int64_t width, words;
};

template <int64_t Lanes>
using WordVector __attribute__((vector_size(4 * Lanes))) = uint32_t;

// Widens each byte to 16 bits, because AVX2's instruction for bytes saturates: the sum of two products of 16 bits
// always fits an int32.
struct OfPairs {
  using Number = int16_t;
  static constexpr int64_t kGroup = 2, kKC = 768;
  static constexpr bool kReusesB = true, kIsUnsignedB = false;
};

// Multiplies four bytes at a time.
struct OfQuads {
  using Number = int8_t;
  static constexpr int64_t kGroup = 4, kKC = 1536;
  static constexpr bool kReusesB = true, kIsUnsignedB = false;
};

// VNNI multiplies unsigned bytes by signed bytes. So op(B) is packed plus 128, and each sum begins at minus 128 times
// the sum of its row of op(A).
struct OfVnni : OfQuads {
  static constexpr bool kIsUnsignedB = true;
};

#if defined(__x86_64__)

namespace amx {

#define JAXMP_TARGET JAXMP_AMX

// Two by two tile registers of sums, as in amx_gemm.cc: the instruction's rows are columns of op(B).
struct Isa {
  using Number = int8_t;
  using Scope = ScopedTiles;
  static constexpr int64_t kGroup = 4, kKC = 2048, kTile = 16, kWordUnit = kTile;
  static constexpr bool kReusesB = false, kIsUnsignedB = false;
  static constexpr int64_t kRowUnit = 2 * kTile, kMR = kRowUnit, kNR = 2 * kTile;

  JAXMP_AMX static void Multiply(const MicroPanels& panels, uint32_t* sums) {
    constexpr int64_t kLine = 4 * kMR, kTileBytes = 4 * kTile;
    const int64_t column = 4 * panels.words;
    asm volatile("" ::: "memory");  // GCC 12's _tile_loadd does not say that it reads memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char *a = panels.a, *b = panels.b, *const end = b + column;
    for (; b != end; a += kTile * kLine, b += kTileBytes) {
      _tile_loadd(4, a, kLine);
      _tile_loadd(5, a + kTileBytes, kLine);
      _tile_loadd(6, b, column);
      _tile_loadd(7, b + kTile * column, column);
      _tile_dpbssd(0, 6, 4);
      _tile_dpbssd(1, 6, 5);
      _tile_dpbssd(2, 7, 4);
      _tile_dpbssd(3, 7, 5);
    }
    _tile_stored(0, sums, kLine);
    _tile_stored(1, sums + kTile, kLine);
    _tile_stored(2, sums + kTile * kMR, kLine);
    _tile_stored(3, sums + kTile * kMR + kTile, kLine);
  }
  static void PutFirst(uint32_t*, int64_t, int64_t) {}
};

#include "csrc/hostmp/kernels/int8_gemm_impl.h"

}  // namespace amx

namespace avx512_vnni {

#define JAXMP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

struct Vectors : OfVnni {
  static constexpr int64_t kLanes = 16;
  static constexpr int kVectors = 3, kCols = 8;
  using V = WordVector<kLanes>;
  JAXMP_TARGET static inline __attribute__((always_inline)) V Dot(V sum, V a, V b) {
    return (V)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
  }
};

#include "csrc/hostmp/kernels/int8_simd_impl.h"

}  // namespace avx512_vnni

namespace avx_vnni {

#define JAXMP_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))

struct Vectors : OfVnni {
  static constexpr int64_t kLanes = 8;
  static constexpr int kVectors = 3, kCols = 4;
  using V = WordVector<kLanes>;
  JAXMP_TARGET static inline __attribute__((always_inline)) V Dot(V sum, V a, V b) {
    return (V)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)b, (__m256i)a);
  }
};

#include "csrc/hostmp/kernels/int8_simd_impl.h"

}  // namespace avx_vnni

namespace avx2 {

#define JAXMP_TARGET __attribute__((target("avx2,fma,f16c")))

struct Vectors : OfPairs {
  static constexpr int64_t kLanes = 8;
  static constexpr int kVectors = 2, kCols = 4;
  using V = WordVector<kLanes>;
  JAXMP_TARGET static inline __attribute__((always_inline)) V Dot(V sum, V a, V b) {
    return sum + (V)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  }
};

#include "csrc/hostmp/kernels/int8_simd_impl.h"

}  // namespace avx2

#elif defined(__aarch64__)

namespace neon_dotprod {

#define JAXMP_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))

struct Vectors : OfQuads {
  static constexpr int64_t kLanes = 4;
  static constexpr int kVectors = 3, kCols = 8;
  using V = WordVector<kLanes>;
  JAXMP_TARGET static inline __attribute__((always_inline)) V Dot(V sum, V a, V b) {
    return (V)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
  }
};

#include "csrc/hostmp/kernels/int8_simd_impl.h"

}  // namespace neon_dotprod

#endif

namespace portable {

#define JAXMP_TARGET

struct Vectors : OfPairs {
  static constexpr int64_t kLanes = 4;
  static constexpr int kVectors = 3, kCols = 4;
  using V = WordVector<kLanes>;
  static V Dot(V sum, V a, V b) { return sum + Low(a) * Low(b) + High(a) * High(b); }

  // A half of each word, extended to 32 bits with its sign.
  using Signed __attribute__((vector_size(4 * kLanes))) = int32_t;
  static V Low(V words) { return High(words << 16); }
  static V High(V words) { return (V)((Signed)words >> 16); }
};

#include "csrc/hostmp/kernels/int8_simd_impl.h"

}  // namespace portable

// Calls f(kernel) with the kernel of an instruction set.
template <typename Function>
auto WithLevel([[maybe_unused]] Int8Level level, Function function) {
#if defined(__x86_64__)
  if (level == Int8Level::kAmx) return function(amx::Kernel{});
  if (level == Int8Level::kAvx512Vnni) return function(avx512_vnni::Kernel{});
  if (level == Int8Level::kAvxVnni) return function(avx_vnni::Kernel{});
  if (level == Int8Level::kAvx2) return function(avx2::Kernel{});
#elif defined(__aarch64__)
  if (level == Int8Level::kNeonDotprod) return function(neon_dotprod::Kernel{});
#endif
  return function(portable::Kernel{});
}

}  // namespace

bool Has(Int8Level level) {
  constexpr bool Cpu::* kFeatures[] = {nullptr,        &Cpu::neon_dotprod, &Cpu::avx2,
                                       &Cpu::avx_vnni, &Cpu::avx512_vnni,  &Cpu::amx};
  return level == Int8Level::kPortable || cpu().*kFeatures[static_cast<size_t>(level)];
}

Int8Level int8_level() {
  for (Int8Level level :
       {Int8Level::kAmx, Int8Level::kAvx512Vnni, Int8Level::kAvxVnni, Int8Level::kAvx2, Int8Level::kNeonDotprod}) {
    if (Has(level)) return level;
  }
  return Int8Level::kPortable;
}

void Int8Gemm(Int8Level level, const Product& product, int32_t alpha, bool adds, char* scratch) {
  WithLevel(level, [&](auto kernel) {
    [[maybe_unused]] const typename decltype(kernel)::Scope scope{};
    kernel = {product, static_cast<uint32_t>(alpha), adds};
    BlockedGemm(kernel, &product, 1, scratch);
  });
}

int64_t Int8GemmScratch(Int8Level level, int64_t m, int64_t n, int64_t k) {
  return WithLevel(level, [&](auto kernel) { return ScratchOf(kernel, m, n, k).bytes(); });
}

}  // namespace jaxmp::hostmp
