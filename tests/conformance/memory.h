// A rank's memory for one case: written before the call, and read after it.
#ifndef JAXMP_TESTS_CONFORMANCE_MEMORY_H_
#define JAXMP_TESTS_CONFORMANCE_MEMORY_H_

#include "tests/conformance/backend.h"
#include "tests/conformance/case.h"

namespace jaxmp::conformance {

constexpr size_t kMargin = 256;
constexpr char kCanary = static_cast<char>(0xa5);

// Bytes between two margins. Everything starts as the canary, so that unwritten bytes stay recognisable.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Rank* rank, size_t bytes)
      : rank_(rank), before_(bytes + 2 * kMargin, kCanary), data_(static_cast<char*>(rank->allocate(before_.size()))) {}
  ~Buffer() {
    if (data_) rank_->release(data_);
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(rank_, other.rank_);
    std::swap(before_, other.before_);
    std::swap(after_, other.after_);
    std::swap(data_, other.data_);
    return *this;
  }

  size_t bytes() const { return before_.empty() ? 0 : before_.size() - 2 * kMargin; }
  // On the device; null if the case has no such buffer.
  char* get() const { return data_ ? data_ + kMargin : nullptr; }
  bool is_missing() const { return !data_ && !before_.empty(); }
  // On the host: the bytes to write, and, after read(), the bytes that were found.
  char* before() { return before_.data() + kMargin; }
  const char* after() const { return after_.data() + kMargin; }

  Status write() const { return data_ ? rank_->write(data_, before_.data(), before_.size()) : Status(); }
  Status read() {
    after_.resize(before_.size());
    return data_ ? rank_->read(after_.data(), data_, after_.size()) : Status();
  }
  bool is_untouched() const { return before_ == after_; }
  bool margins_are_intact() const {
    const size_t end = before_.size() - (before_.empty() ? 0 : kMargin);
    for (size_t i = 0; i < before_.size(); ++i) {
      if ((i < kMargin || i >= end) && after_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  Rank* rank_ = nullptr;
  std::vector<char> before_, after_;
  char* data_ = nullptr;
};

// Element `index` of an array of any type; 4-bit elements are two in a byte, the first in the low half.
inline Number get_element(cudaDataType_t type, const char* data, int64_t index) {
  if (Facts(type).bits != 4) return test::decode(type, data + index * Facts(type).bytes);
  float pair[2];
  hostmp::Decode(type, data, index & ~int64_t{1}, 2, 1.0f, pair);
  return pair[index % 2];
}

inline size_t bytes_of(cudaDataType_t type, int64_t elements) {
  return static_cast<size_t>((elements * Facts(type).bits + 7) / 8);
}

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_MEMORY_H_
