// A bounded map from keys to shared values: least recently used out first, equality by value.
// Holders of a value keep it alive after it has left the cache, so a bound never breaks a live call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "csrc/base/status.h"

namespace jaxmp {

struct CacheInfo {
  int64_t hits = 0, misses = 0;
  size_t size = 0, capacity = 0;
};

template <typename Key, typename Value, typename Hash = std::hash<Key>>
class LruCache {
 public:
  explicit LruCache(size_t capacity) { info_.capacity = capacity; }

  // The value of `key`, made by `make(key)` on a miss. Making one may be collective or slow, so it
  // never runs under the lock: of two threads that miss at once, the first to finish wins and both
  // return its value. A failure is returned and not remembered.
  template <typename Make>
  StatusOr<std::shared_ptr<Value>> Get(const Key& key, Make&& make) {
    if (auto value = Find(key)) return value;
    StatusOr<std::shared_ptr<Value>> made = make(key);
    if (!made.ok()) return made.status();
    return Insert(key, std::move(*made));
  }

  CacheInfo info() const {
    std::lock_guard<std::mutex> lock(mutex_);
    CacheInfo info = info_;
    info.size = entries_.size();
    return info;
  }

  // Forgets every value and sets the counters to zero.
  void Clear() {
    Entries dropped;  // values are destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    index_.clear();
    dropped.swap(entries_);
    info_.hits = info_.misses = 0;
  }

  void set_capacity(size_t capacity) {
    Entries dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    info_.capacity = capacity;
    Shrink(&dropped);
  }

 private:
  using Entries = std::list<std::pair<Key, std::shared_ptr<Value>>>;

  std::shared_ptr<Value> Find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(&key);
    if (found == index_.end()) {
      ++info_.misses;
      return nullptr;
    }
    ++info_.hits;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
  }

  std::shared_ptr<Value> Insert(const Key& key, std::shared_ptr<Value> value) {
    Entries dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = index_.find(&key); found != index_.end()) return found->second->second;
    entries_.emplace_front(key, value);
    index_.emplace(&entries_.front().first, entries_.begin());
    Shrink(&dropped);
    return value;
  }

  void Shrink(Entries* dropped) {
    while (entries_.size() > info_.capacity) {
      index_.erase(&entries_.back().first);
      dropped->splice(dropped->begin(), entries_, std::prev(entries_.end()));
    }
  }

  // The index points at the keys inside the list: one copy of each, and list nodes do not move.
  struct HashOf {
    size_t operator()(const Key* key) const { return Hash()(*key); }
  };
  struct Equal {
    bool operator()(const Key* x, const Key* y) const { return *x == *y; }
  };

  mutable std::mutex mutex_;
  Entries entries_;
  std::unordered_map<const Key*, typename Entries::iterator, HashOf, Equal> index_;
  CacheInfo info_;
};

}  // namespace jaxmp
