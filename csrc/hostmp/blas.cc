#include "csrc/hostmp/blas.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/hostmp/amx_kernel.h"
#include "csrc/hostmp/bf16_kernel.h"
#include "csrc/hostmp/cpu.h"
#include "csrc/hostmp/elementwise.h"
#include "csrc/hostmp/host.h"

namespace jaxmp::hostmp {
namespace {

using abi::cublasOperation_t;

// CBLAS with 32-bit integers.
template <typename T>
using RealGemm = void (*)(int, int, int, int, int, int, T, const T*, int, const T*, int, T, T*, int);
using ComplexGemm = void (*)(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*,
                             void*, int);
using MixedGemm = void (*)(int, int, int, int, int, int, float, const uint16_t*, int, const uint16_t*, int, float,
                           float*, int);
constexpr int kColMajor = 102;
constexpr int kTransposes[] = {111, 112, 113};  // by cublasOperation_t

enum class Kernel16 { kWidened, kMkl, kAmx, kAvx512Bf16 };

struct Libraries {
  RealGemm<float> sgemm = nullptr;
  RealGemm<double> dgemm = nullptr;
  ComplexGemm cgemm = nullptr, zgemm = nullptr;
  MixedGemm bf16 = nullptr, f16 = nullptr;
  Kernel16 bf16_kernel = Kernel16::kWidened, f16_kernel = Kernel16::kWidened;
  BlasInfo info;
};

// Written once, under the mutex, before `loaded` is set; never freed, because a product may run until the very end.
std::mutex load_mutex;
std::atomic<const Libraries*> loaded{nullptr};

// OpenBLAS from scipy-openblas32 carries a prefix; any other CBLAS does not.
template <typename Function>
bool find(void* library, const char* name, Function* function) {
  const std::string prefixed = std::string("scipy_") + name;
  void* symbol = dlsym(library, prefixed.c_str());
  if (!symbol) symbol = dlsym(library, name);
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

Status load_cblas(const char* path, Libraries* libraries) {
  // RTLD_LOCAL: numpy and scipy bring a BLAS with the same names.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return FailedPrecondition(std::string("jaxmp: cannot open the BLAS: ") + dlerror());
  const bool is_complete =
      find(library, "cblas_sgemm", &libraries->sgemm) && find(library, "cblas_dgemm", &libraries->dgemm) &&
      find(library, "cblas_cgemm", &libraries->cgemm) && find(library, "cblas_zgemm", &libraries->zgemm);
  if (!is_complete) {
    return FailedPrecondition(std::string("jaxmp: the BLAS ") + path +
                              " has no cblas_{s,d,c,z}gemm; pass the library of scipy-openblas32");
  }
  libraries->info.library = path;
  // The tiles are the parallelism: a BLAS that forks inside one would only oversubscribe.
  void (*set_num_threads)(int) = nullptr;
  if (find(library, "openblas_set_num_threads", &set_num_threads)) set_num_threads(1);
  char* (*get_config)() = nullptr;
  if (find(library, "openblas_get_config", &get_config)) libraries->info.config = get_config();
  return {};
}

Status load_mkl(const char* path, Libraries* libraries) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return FailedPrecondition(std::string("jaxmp: cannot open MKL: ") + dlerror());
  // The sequential layer has to be chosen before MKL's first computation.
  int (*set_threading_layer)(int) = nullptr;
  constexpr int kSequential = 1;
  if (find(library, "MKL_Set_Threading_Layer", &set_threading_layer)) set_threading_layer(kSequential);
  find(library, "cblas_gemm_bf16bf16f32", &libraries->bf16);
  find(library, "cblas_gemm_f16f16f32", &libraries->f16);
  libraries->info.mkl = path;
  return {};
}

// In the order of their rates (docs/benchmarks.md, docs/benchmarks-mkl.md). MKL's own 16-bit kernels need AMX: on Zen 4
// it widens bf16 and runs at the rate of sgemm, our AVX512_BF16 kernel at twice that.
void choose_kernels(Libraries* libraries) {
  if (libraries->bf16 && cpu().amx_bf16) {
    libraries->bf16_kernel = Kernel16::kMkl;
  } else if (cpu().amx_bf16) {
    libraries->bf16_kernel = Kernel16::kAmx;
  } else if (cpu().avx512_bf16) {
    libraries->bf16_kernel = Kernel16::kAvx512Bf16;
  }
  if (libraries->f16 && cpu().amx_fp16) libraries->f16_kernel = Kernel16::kMkl;
}

std::string describe(Kernel16 kernel) {
  switch (kernel) {
    case Kernel16::kMkl:
      return "MKL, products of 16-bit numbers summed in f32";
    case Kernel16::kAmx:
      return "hostmp's AMX kernel, summed in f32";
    case Kernel16::kAvx512Bf16:
      return "hostmp's AVX512_BF16 kernel, summed in f32";
    case Kernel16::kWidened:
      break;
  }
  return "widened to f32, cblas_sgemm";
}

template <typename T, typename Function>
void call_real(Function function, const Product& p, T alpha, T beta) {
  const auto plain = [](cublasOperation_t op) { return op == abi::CUBLAS_OP_N ? kTransposes[0] : kTransposes[1]; };
  function(kColMajor, plain(p.trans_a), plain(p.trans_b), static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), alpha, static_cast<const T*>(p.a), static_cast<int>(p.lda),
           static_cast<const T*>(p.b), static_cast<int>(p.ldb), beta, static_cast<T*>(p.c), static_cast<int>(p.ldc));
}

template <typename T>
void call_complex(ComplexGemm function, const Product& p, T alpha, T beta) {
  function(kColMajor, kTransposes[p.trans_a], kTransposes[p.trans_b], static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), &alpha, p.a, static_cast<int>(p.lda), p.b, static_cast<int>(p.ldb), &beta, p.c,
           static_cast<int>(p.ldc));
}

void call_mixed(MixedGemm function, const Product& p, float alpha, float beta) {
  const auto plain = [](cublasOperation_t op) { return op == abi::CUBLAS_OP_N ? kTransposes[0] : kTransposes[1]; };
  function(kColMajor, plain(p.trans_a), plain(p.trans_b), static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), alpha, static_cast<const uint16_t*>(p.a), static_cast<int>(p.lda),
           static_cast<const uint16_t*>(p.b), static_cast<int>(p.ldb), beta, static_cast<float*>(p.c),
           static_cast<int>(p.ldc));
}

// Panels of k that are widened at a time: deep enough for sgemm's own blocking, small enough to stay in the cache.
constexpr int64_t kPanelDepth = 512;

// Widens `cols` stored columns of `rows` numbers into a dense panel.
template <typename T>
void widen_panel(const T* from, int64_t ld, int64_t rows, int64_t cols, float* to) {
  for (int64_t col = 0; col < cols; ++col) widen(from + col * ld, to + col * rows, rows);
}

template <typename T>
void gemm_widened(const Product& p, float alpha, float beta, char* scratch) {
  const bool is_a_plain = p.trans_a == abi::CUBLAS_OP_N, is_b_plain = p.trans_b == abi::CUBLAS_OP_N;
  float* const panel_a = reinterpret_cast<float*>(scratch);
  float* const panel_b = panel_a + round_up(p.m * std::min(p.k, kPanelDepth), 16);
  const T* const a = static_cast<const T*>(p.a);
  const T* const b = static_cast<const T*>(p.b);
  for (int64_t at = 0; at < p.k; at += kPanelDepth) {
    const int64_t depth = std::min(kPanelDepth, p.k - at);
    is_a_plain ? widen_panel(a + at * p.lda, p.lda, p.m, depth, panel_a)
               : widen_panel(a + at, p.lda, depth, p.m, panel_a);
    is_b_plain ? widen_panel(b + at, p.ldb, depth, p.n, panel_b)
               : widen_panel(b + at * p.ldb, p.ldb, p.n, depth, panel_b);
    gemm({p.trans_a, p.trans_b, p.m, p.n, depth, panel_a, is_a_plain ? p.m : depth, panel_b, is_b_plain ? depth : p.n,
          p.c, p.ldc},
         alpha, at == 0 ? beta : 1.0f);
  }
}

// As few calls as there may be: a part of which the kernel's instruction does not take the last k whole ends one.
void gemm_in_parts(void (*kernel)(const Parts&, float, float, char*), int64_t unit, const Parts& parts, float alpha,
                   float beta, char* scratch) {
  Parts together;
  for (const Product& part : parts) {
    together.push_back(part);
    if (part.k % unit == 0 && &part != &parts.back()) continue;
    kernel(together, alpha, beta, scratch);
    together.clear();
    beta = 1;
  }
}

// OpenBLAS 0.3.34 takes another kernel for small single-precision products (m n k up to 1e6), and the one for two
// transposed operands is not safe on two threads at once: it crashes, or mixes up their operands (seen on a processor
// with AVX-512; tests/cpp/hostmp_blas.cc). Tiles of that size take microseconds, so they take turns.
std::mutex small_tt_mutex;
constexpr int64_t kSmallTt = 2'000'000;

Kernel16 kernel_for(abi::cudaDataType_t type) {
  const Libraries& libraries = *loaded.load(std::memory_order_acquire);
  return type == abi::CUDA_R_16BF ? libraries.bf16_kernel : libraries.f16_kernel;
}

}  // namespace

Status load_blas(const char* blas_path, const char* mkl_path) {
  std::lock_guard<std::mutex> lock(load_mutex);
  if (blas_is_loaded()) return {};
  if (!blas_path) return InvalidArgument("jaxmp: load_blas: blas_path is null; pass the library of scipy-openblas32");
  auto libraries = std::make_unique<Libraries>();
  JAXMP_RETURN_IF_ERROR(load_cblas(blas_path, libraries.get()));
  if (mkl_path && *mkl_path) JAXMP_RETURN_IF_ERROR(load_mkl(mkl_path, libraries.get()));
  choose_kernels(libraries.get());
  BlasInfo& info = libraries->info;
  info.f32 = "cblas_sgemm, few rows in place";
  info.f64 = "cblas_dgemm, few rows in place";
  info.c64 = "cblas_cgemm";
  info.c128 = "cblas_zgemm";
  info.bf16 = describe(libraries->bf16_kernel);
  info.f16 = describe(libraries->f16_kernel);
  loaded.store(libraries.release(), std::memory_order_release);
  return {};
}

bool blas_is_loaded() { return loaded.load(std::memory_order_acquire) != nullptr; }

BlasInfo blas_info() {
  const Libraries* libraries = loaded.load(std::memory_order_acquire);
  return libraries ? libraries->info : BlasInfo{};
}

void gemm(const Product& p, float alpha, float beta) {
  const bool is_tt = p.trans_a != abi::CUBLAS_OP_N && p.trans_b != abi::CUBLAS_OP_N;
  std::unique_lock<std::mutex> lock(small_tt_mutex, std::defer_lock);
  if (is_tt && p.m * p.n * p.k <= kSmallTt) lock.lock();
  call_real(loaded.load(std::memory_order_acquire)->sgemm, p, alpha, beta);
}
void gemm(const Product& p, double alpha, double beta) {
  call_real(loaded.load(std::memory_order_acquire)->dgemm, p, alpha, beta);
}
void gemm(const Product& p, Complex64 alpha, Complex64 beta) {
  call_complex(loaded.load(std::memory_order_acquire)->cgemm, p, alpha, beta);
}
void gemm(const Product& p, Complex128 alpha, Complex128 beta) {
  call_complex(loaded.load(std::memory_order_acquire)->zgemm, p, alpha, beta);
}

void gemm16(abi::cudaDataType_t type, const Parts& parts, float alpha, float beta, char* scratch) {
  const Libraries& libraries = *loaded.load(std::memory_order_acquire);
  const Kernel16 kernel = kernel_for(type);
  if (kernel == Kernel16::kAmx) return gemm_in_parts(amx_gemm, kAmxUnit, parts, alpha, beta, scratch);
  if (kernel == Kernel16::kAvx512Bf16) return gemm_in_parts(bf16_gemm, kBf16Unit, parts, alpha, beta, scratch);
  const bool is_bf16 = type == abi::CUDA_R_16BF;
  for (const Product& p : parts) {
    if (kernel == Kernel16::kMkl) {
      call_mixed(is_bf16 ? libraries.bf16 : libraries.f16, p, alpha, beta);
    } else {
      is_bf16 ? gemm_widened<BFloat16>(p, alpha, beta, scratch) : gemm_widened<Float16>(p, alpha, beta, scratch);
    }
    beta = 1;
  }
}

int64_t gemm16_scratch(abi::cudaDataType_t type, int64_t m, int64_t n, int64_t k) {
  switch (kernel_for(type)) {
    case Kernel16::kMkl:
      return 0;
    case Kernel16::kAmx:
      return amx_gemm_scratch(m, n, k);
    case Kernel16::kAvx512Bf16:
      return bf16_gemm_scratch(m, n, k);
    case Kernel16::kWidened:
      break;
  }
  const int64_t depth = std::min(k, kPanelDepth);
  return 4 * (round_up(m * depth, 16) + round_up(n * depth, 16));
}

}  // namespace jaxmp::hostmp
