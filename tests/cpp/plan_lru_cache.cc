// The bounded cache: eviction order, equality by value, counters, and threads that miss together.

#include "csrc/base/lru_cache.h"
#include "csrc/base/status.h"
#include "tests/cpp/check.h"

namespace jaxmp {
namespace {

struct SameHash {
  size_t operator()(const std::string&) const { return 42; }
};
using Cache = LruCache<std::string, std::string, SameHash>;

StatusOr<std::shared_ptr<std::string>> Echo(const std::string& key) { return std::make_shared<std::string>(key); }

void CheckInfo(const Cache& cache, int64_t hits, int64_t misses, size_t size) {
  const CacheInfo info = cache.info();
  CHECK_EQ(info.hits, hits);
  CHECK_EQ(info.misses, misses);
  CHECK_EQ(info.size, size);
}

TEST(KeysOfOneHashKeepTheirOwnValues) {
  Cache cache(8);
  for (int round = 0; round < 2; ++round) {
    for (const char* key : {"a", "b", "c"}) CHECK(**cache.Get(key, Echo) == key);
  }
  CheckInfo(cache, 3, 3, 3);
}

TEST(LeastRecentlyUsedGoesFirst) {
  Cache cache(2);
  const auto a = *cache.Get("a", Echo);
  (void)cache.Get("b", Echo);
  (void)cache.Get("a", Echo);  // now b is the older one
  (void)cache.Get("c", Echo);
  CHECK(*cache.Get("a", Echo) == a);
  CheckInfo(cache, 2, 3, 2);
  (void)cache.Get("b", Echo);
  CheckInfo(cache, 2, 4, 2);
  cache.set_capacity(1);
  CheckInfo(cache, 2, 4, 1);
  CHECK_EQ(*a, "a");  // still held
}

TEST(FailuresAreNotRemembered) {
  Cache cache(2);
  const auto fail = [](const std::string&) -> StatusOr<std::shared_ptr<std::string>> { return InvalidArgument("no"); };
  CHECK_EQ(cache.Get("a", fail).status().message(), "no");
  CHECK(cache.Get("a", Echo).ok());
  CheckInfo(cache, 0, 2, 1);
  cache.Clear();
  CheckInfo(cache, 0, 0, 0);
}

TEST(ThreadsThatMissTogetherGetOneValue) {
  Cache cache(2);
  std::atomic<int> waiting{0};
  const auto slow = [&](const std::string& key) {
    ++waiting;
    while (waiting < 4) std::this_thread::yield();  // all have missed
    return Echo(key);
  };
  std::vector<std::shared_ptr<std::string>> values(4);
  std::vector<std::thread> threads;
  for (auto& value : values) threads.emplace_back([&] { value = *cache.Get("a", slow); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& value : values) CHECK(value == values[0]);
  CheckInfo(cache, 0, 4, 1);
}

}  // namespace
}  // namespace jaxmp
