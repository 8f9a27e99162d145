#include "csrc/hostmp/gemm/cblas.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace jaxmp::hostmp {
namespace {

using abi::cublasOperation_t;

// CBLAS with 32-bit integers.
template <typename T>
using RealGemm = void (*)(int, int, int, int, int, int, T, const T*, int, const T*, int, T, T*, int);
using ComplexGemm = void (*)(int, int, int, int, int, int, const void*, const void*, int, const void*, int, const void*,
                             void*, int);
constexpr int kColMajor = 102;
constexpr int kTransposes[] = {111, 112, 113};  // by cublasOperation_t

struct Blas {
  RealGemm<float> sgemm = nullptr;
  RealGemm<double> dgemm = nullptr;
  ComplexGemm cgemm = nullptr, zgemm = nullptr;
  BlasLibrary described;
};

// Written once, under the mutex, before `loaded` is set. Never freed, because a product may run until the very end.
std::mutex load_mutex;
std::atomic<const Blas*> loaded{nullptr};

// Finds a function. OpenBLAS from scipy-openblas32 prefixes its names; other CBLAS libraries do not.
template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  const std::string prefixed = std::string("scipy_") + name;
  void* symbol = dlsym(library, prefixed.c_str());
  if (!symbol) symbol = dlsym(library, name);
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

Status LoadCblas(const char* path, Blas* blas) {
  // RTLD_LOCAL, because numpy and scipy bring a BLAS with the same names.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return FailedPrecondition("jaxmp: cannot open the BLAS: ", dlerror());
  const bool is_complete = Find(library, "cblas_sgemm", &blas->sgemm) && Find(library, "cblas_dgemm", &blas->dgemm) &&
                           Find(library, "cblas_cgemm", &blas->cgemm) && Find(library, "cblas_zgemm", &blas->zgemm);
  if (!is_complete) {
    return FailedPrecondition("jaxmp: the BLAS ", path,
                              " has no cblas_{s,d,c,z}gemm; pass the library of scipy-openblas32");
  }
  blas->described.path = path;
  // One thread: the tiles are the parallelism, and a BLAS that forks inside a tile would only oversubscribe.
  void (*set_num_threads)(int) = nullptr;
  if (Find(library, "openblas_set_num_threads", &set_num_threads)) set_num_threads(1);
  char* (*get_config)() = nullptr;
  if (Find(library, "openblas_get_config", &get_config)) blas->described.config = get_config();
  return {};
}

template <typename T, typename Function>
void CallReal(Function function, const Product& p, T alpha, T beta) {
  const auto plain = [](cublasOperation_t op) { return op == abi::CUBLAS_OP_N ? kTransposes[0] : kTransposes[1]; };
  function(kColMajor, plain(p.trans_a), plain(p.trans_b), static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), alpha, static_cast<const T*>(p.a), static_cast<int>(p.lda),
           static_cast<const T*>(p.b), static_cast<int>(p.ldb), beta, static_cast<T*>(p.c), static_cast<int>(p.ldc));
}

template <typename T>
void CallComplex(ComplexGemm function, const Product& p, T alpha, T beta) {
  function(kColMajor, kTransposes[p.trans_a], kTransposes[p.trans_b], static_cast<int>(p.m), static_cast<int>(p.n),
           static_cast<int>(p.k), &alpha, p.a, static_cast<int>(p.lda), p.b, static_cast<int>(p.ldb), &beta, p.c,
           static_cast<int>(p.ldc));
}

// OpenBLAS 0.3.34 has another kernel for small single-precision products (m n k up to 1e6). For two transposed operands
// it is not safe on two threads at once: it crashes or mixes up their operands (seen on a processor with AVX-512;
// tests/cpp/hostmp_blas.cc). Such products take microseconds, so they run one at a time.
std::mutex small_tt_mutex;
constexpr int64_t kSmallTt = 2'000'000;

const Blas& loaded_blas() { return *loaded.load(std::memory_order_acquire); }

}  // namespace

Status LoadBlas(const char* blas_path) {
  std::lock_guard<std::mutex> lock(load_mutex);
  if (blas_is_loaded()) return {};
  if (!blas_path) return InvalidArgument("jaxmp: LoadBlas: blas_path is null; pass the library of scipy-openblas32");
  auto opened = std::make_unique<Blas>();
  JAXMP_RETURN_IF_ERROR(LoadCblas(blas_path, opened.get()));
  loaded.store(opened.release(), std::memory_order_release);
  return {};
}

bool blas_is_loaded() { return loaded.load(std::memory_order_acquire) != nullptr; }

bool blas_is_openblas() { return blas_is_loaded() && !loaded_blas().described.config.empty(); }

BlasLibrary blas_library() { return blas_is_loaded() ? loaded_blas().described : BlasLibrary{}; }

void Gemm(const Product& p, float alpha, float beta) {
  const bool is_tt = p.trans_a != abi::CUBLAS_OP_N && p.trans_b != abi::CUBLAS_OP_N;
  std::unique_lock<std::mutex> lock(small_tt_mutex, std::defer_lock);
  if (is_tt && p.m * p.n * p.k <= kSmallTt) lock.lock();
  CallReal(loaded_blas().sgemm, p, alpha, beta);
}
void Gemm(const Product& p, double alpha, double beta) { CallReal(loaded_blas().dgemm, p, alpha, beta); }
void Gemm(const Product& p, Complex64 alpha, Complex64 beta) { CallComplex(loaded_blas().cgemm, p, alpha, beta); }
void Gemm(const Product& p, Complex128 alpha, Complex128 beta) { CallComplex(loaded_blas().zgemm, p, alpha, beta); }

}  // namespace jaxmp::hostmp
