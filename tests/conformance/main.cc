// conformance: runs the cases on one library and prints a line of JSON for each case and rank.
//
//   conformance --library host --ranks 2,3 [--only TEXT] [--after NAME] [--share I/N] [--cases hostmp] [--threads N]
//   conformance --library cublasmp --ranks 2 --cublasmp PATH --nccl PATH --driver PATH [--rank 0 --id FILE]
//
// All ranks are threads of this process or, with --rank, this process is one of them. Cases that cuBLASMp is known not
// to compute as documented run on it only with --faults yes, because some of them end the process. hostmp has to answer
// as each case expects, so its exit status is the number of surprises; compare.py judges the real library. Status 3: a
// case did not end within --seconds. Status 4: the device cannot go on after a failure.
#include <chrono>
#include <condition_variable>
#include <optional>

#include "tests/conformance/run.h"
#include "tests/cpp/check.h"

namespace jaxmp::conformance {
namespace {

using Options = std::map<std::string, std::string>;

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + '"';
}

bool is_expected(const Case& c, const Expected& expected, const Outcome& outcome) {
  if (outcome.status != c.expected || !outcome.is_memory_intact) return false;
  for (const std::string& part : c.says) {
    if (outcome.error.find(part) == std::string::npos) return false;
  }
  const bool is_exact = expected.is_exact && c.d_out_scale == kUnscaled;
  for (const auto& [name, verdict] : outcome.results) {
    if (verdict.worst > 1 || (is_exact && !verdict.is_exact)) return false;
  }
  return true;
}

std::string line_of(const Case& c, const Expected& expected, int nranks, int rank, const char* library,
                    const std::string& words, bool is_symmetric, const Outcome& outcome) {
  std::string results;
  for (const auto& [name, verdict] : outcome.results) {
    char text[96];
    std::snprintf(text, sizeof(text), "%s%s: {\"exact\": %s, \"worst\": %.3g}", results.empty() ? "" : ", ",
                  quoted(name).c_str(), expected.is_exact && verdict.is_exact ? "true" : "false", verdict.worst);
    results += text;
  }
  return "{\"case\": " + quoted(c.name()) + ", \"ranks\": " + std::to_string(nranks) +
         ", \"rank\": " + std::to_string(rank) + ", \"library\": " + quoted(library) +
         ", \"capability\": " + quoted(c.capability) + ", \"stage\": " + quoted(outcome.stage) +
         ", \"status\": " + std::to_string(outcome.status) + ", \"error\": " + quoted(outcome.error) +
         ", \"workspace\": " + std::to_string(outcome.workspace) + ", \"words\": " + quoted(words) +
         ", \"symmetric\": " + (is_symmetric ? "true" : "false") +
         ", \"intact\": " + (outcome.is_memory_intact ? "true" : "false") +
         ", \"expected\": " + (is_expected(c, expected, outcome) ? "true" : "false") + ", \"results\": {" + results +
         "}}";
}

// The ranks of this process, on threads of their own, which take one case after the other.
class Ranks {
 public:
  Ranks(Backend* backend, int nranks, std::optional<int> only) {
    for (int rank = 0; rank < nranks; ++rank) {
      if (only && *only != rank) continue;
      ranks_.push_back(rank);
    }
    outcomes.resize(ranks_.size());
    failures.resize(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads_.emplace_back([this, backend, nranks, i] { serve(backend, nranks, i); });
    }
  }

  // Runs `work` on every rank; false if they did not all end in time.
  bool each(std::function<void(Runner*, size_t)> work, std::chrono::seconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = std::move(work);
    left_ = ranks_.size();
    ++turn_;
    wake_.notify_all();
    return wake_.wait_for(lock, limit, [this] { return left_ == 0; });
  }

  bool end(std::chrono::seconds limit) {
    const bool ended = each(nullptr, limit);
    for (std::thread& thread : threads_) ended ? thread.join() : thread.detach();
    return ended;
  }

  const std::vector<int>& numbers() const { return ranks_; }
  std::vector<Outcome> outcomes;
  std::vector<Status> failures;  // of making the rank

 private:
  void serve(Backend* backend, int nranks, size_t i) {
    std::unique_ptr<Rank> rank;
    std::unique_ptr<Runner> runner;
    for (int64_t turn = 1;; ++turn) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this, turn] { return turn_ >= turn; });
      const auto work = work_;
      lock.unlock();
      if (turn == 1) {
        failures[i] = start(backend, nranks, i, &rank, &runner);
      } else if (work && runner) {
        work(runner.get(), i);
      } else {
        runner.reset();
        rank.reset();
      }
      lock.lock();
      if (--left_ == 0) wake_.notify_all();
      if (turn > 1 && !work) return;
    }
  }

  Status start(Backend* backend, int nranks, size_t i, std::unique_ptr<Rank>* rank, std::unique_ptr<Runner>* runner) {
    JAXMP_ASSIGN_OR_RETURN(*rank, backend->make_rank(ranks_[i]));
    *runner = std::make_unique<Runner>(*backend, **rank, ranks_[i], nranks);
    return (*runner)->start();
  }

  std::vector<int> ranks_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::function<void(Runner*, size_t)> work_;
  size_t left_ = 0;
  int64_t turn_ = 0;
};

// The cases that the options leave, with their index among all of them: the number of their call on every rank.
std::vector<std::pair<int64_t, Case>> chosen(const Options& options, int nranks) {
  const auto option = [&options](const char* name) {
    const auto found = options.find(name);
    return found == options.end() ? std::string() : found->second;
  };
  const std::string only = option("only"), after = option("after"), share = option("share");
  const int64_t index = share.empty() ? 0 : std::atoll(share.c_str());
  const int64_t count = share.empty() ? 1 : std::atoll(share.c_str() + share.find('/') + 1);
  std::vector<std::pair<int64_t, Case>> result;
  const bool is_asked_all = option("library") == "host" || option("faults") == "yes";
  int64_t number = 0;
  bool is_past = after.empty();
  for (Case& c : option("cases") == "hostmp" ? hostmp_cases(nranks) : all_cases(nranks)) {
    ++number;
    const std::string name = c.name();
    if (is_past && name.find(only) != std::string::npos && number % count == index % count &&
        (is_asked_all || c.capability != "as_documented")) {
      result.emplace_back(number, std::move(c));
    }
    is_past = is_past || name == after;
  }
  return result;
}

int run_cases(const Options& options, Backend* backend, int nranks) {
  const auto rank = options.find("rank");
  const auto seconds = options.find("seconds");
  const std::chrono::seconds limit(seconds == options.end() ? 60 : std::atoll(seconds->second.c_str()));
  const bool is_host = options.at("library") == "host";
  Ranks ranks(backend, nranks, rank == options.end() ? std::nullopt : std::optional(std::atoi(rank->second.c_str())));
  const auto late = [](const std::string& what) {
    std::fprintf(stderr, "did not end in time: %s\n", what.c_str());
    std::fflush(nullptr);
    std::_Exit(3);  // threads are stuck inside the library
  };
  if (!ranks.each(nullptr, limit)) late("the making of the ranks");
  for (const Status& failure : ranks.failures) {
    if (failure.ok()) continue;
    std::fprintf(stderr, "%s\n", failure.message().c_str());
    std::fflush(nullptr);
    std::_Exit(2);  // the others may be waiting for this one inside the library
  }
  int surprises = 0;
  for (const auto& [number, c] : chosen(options, nranks)) {
    // Before the case, so that a crash has a name.
    std::printf("{\"begins\": %s, \"ranks\": %d}\n", quoted(c.name()).c_str(), nranks);
    std::fflush(stdout);
    const Operands operands(c);
    const Expected expected(c, operands);
    std::atomic<bool> is_symmetric{true};
    const auto work = [&, number = number, &c = c](Runner* runner, size_t i) {
      ranks.outcomes[i] = runner->run(c, operands, expected, number);
      if (!runner->is_symmetric()) is_symmetric = false;
    };
    if (!ranks.each(work, limit)) late(c.name());
    const std::string words = backend->take_words();
    bool is_broken = false;
    for (size_t i = 0; i < ranks.numbers().size(); ++i) {
      const Outcome& outcome = ranks.outcomes[i];
      const std::string line =
          line_of(c, expected, nranks, ranks.numbers()[i], backend->api().name, words, is_symmetric, outcome);
      std::printf("%s\n", line.c_str());
      const bool is_right = is_expected(c, expected, outcome);
      surprises += !is_right;
      if (is_host && !is_right) std::fprintf(stderr, "%s\n", line.c_str());
      is_broken = is_broken || outcome.stage == "run" || outcome.stage == "memory";
    }
    std::fflush(stdout);
    if (is_broken && !is_host) std::_Exit(4);
  }
  if (!ranks.end(limit)) late("the end of the ranks");
  return is_host ? surprises : 0;
}

int usage(const std::string& why) {
  std::fprintf(stderr,
               "%s\nusage: conformance --library host|cublasmp --ranks N [--only TEXT] [--after NAME] [--share I/N]\n"
               "  [--cases hostmp] [--faults yes] [--threads N] [--seconds S] [--blas PATH] [--cublasmp PATH --nccl "
               "PATH --driver "
               "PATH] [--rank R --id FILE]\n",
               why.c_str());
  return 2;
}

StatusOr<std::unique_ptr<Backend>> make_backend(Options options, int nranks) {
  const std::string library = options["library"];
  if (library == "host") {
    const char* blas = std::getenv("JAXMP_BLAS");
    JAXMP_RETURN_IF_ERROR(hostmp::LoadBlas(options.count("blas") ? options["blas"].c_str() : blas ? blas : ""));
    check::limit_instruction_set();
    return make_host_backend(nranks, std::atoi(options["threads"].c_str()));
  }
  if (library != "cublasmp") return InvalidArgument("--library must be host or cublasmp");
  if (options.count("rank") != options.count("id")) return InvalidArgument("--rank and --id go together");
  CudaOptions cuda;
  for (const auto& [name, value] : {std::pair("cublasmp", &cuda.cublasmp), std::pair("nccl", &cuda.nccl),
                                    std::pair("driver", &cuda.driver), std::pair("id", &cuda.id_file)}) {
    if (options.count(name)) *value = options[name];
  }
  return make_cuda_backend(nranks, cuda);
}

}  // namespace

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]).rfind("--", 0) != 0) return usage(std::string("unknown argument ") + argv[i]);
    options[argv[i] + 2] = argv[i + 1];
  }
  std::istringstream list(options["ranks"]);
  int surprises = 0;
  for (std::string ranks; std::getline(list, ranks, ',');) {
    const int nranks = std::atoi(ranks.c_str());
    if (nranks < 1) return usage("--ranks must be numbers");
    StatusOr<std::unique_ptr<Backend>> backend = make_backend(options, nranks);
    if (!backend.ok()) return usage(backend.status().message());
    surprises += run_cases(options, backend->get(), nranks);
    std::fprintf(stderr, "conformance: %s with %d ranks, %d surprises\n", (*backend)->api().name, nranks, surprises);
  }
  return surprises == 0 ? 0 : 1;
}

}  // namespace jaxmp::conformance

int main(int argc, char** argv) { return jaxmp::conformance::run(argc, argv); }
