#include <atomic>
#include <deque>
#include <iterator>
#include <mutex>
#include <utility>

#include "csrc/cuda/libraries.h"

namespace jaxmp::cuda {
namespace {

constexpr size_t kMostLines = 4096;
constexpr int kErrors = 1, kEverything = 5;

constexpr size_t kLongestError = 2000;

thread_local std::string last_error, taken_error;

struct Lines {
  std::mutex mutex;
  std::deque<std::string> lines;
};

Lines& lines() {
  static auto* const all = new Lines;  // the library may still report when statics are destroyed
  return *all;
}

void OnMessage(int level, const char* function, const char* message) {
  std::string line = std::string("[") + (function ? function : "") + "] " + (message ? message : "");
  while (!line.empty() && line.back() == '\n') line.pop_back();
  if (level == kErrors && last_error.size() < kLongestError) last_error += (last_error.empty() ? "" : "; ") + line;
  std::lock_guard<std::mutex> lock(lines().mutex);
  lines().lines.push_back(std::move(line));
  if (lines().lines.size() > kMostLines) lines().lines.pop_front();
}

std::atomic<bool> is_logging{false};

}  // namespace

void SetLogging(bool is_on) {
  is_logging = is_on;
  if (const Libraries* libraries = Loaded()) ApplyLogging(*libraries);
}

// Ignores errors: a library that reports nothing works all the same.
void ApplyLogging(const Libraries& libraries) {
  (void)libraries.logger.SetCallback(OnMessage);
  (void)libraries.logger.SetFile(nullptr);
  (void)libraries.logger.SetLevel(is_logging ? kEverything : kErrors);
}

std::vector<std::string> TakeLog() {
  std::deque<std::string> taken;
  {
    std::lock_guard<std::mutex> lock(lines().mutex);
    taken.swap(lines().lines);
  }
  return {std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end())};
}

const char* TakeLastError() {
  taken_error = std::exchange(last_error, std::string());
  return taken_error.c_str();
}

}  // namespace jaxmp::cuda
