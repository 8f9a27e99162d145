#include <filesystem>

#include "tests/cpp/check.h"

int main(int argc, char** argv) {
  using namespace jaxmp::check;  // NOLINT
  const std::string name = argc == 2 ? argv[1] : "";
  limit_instruction_set();
  int count = 0;
  for (const Test& test : Test::all()) {
    if (std::filesystem::path(test.file).stem() != name) continue;
    const int before = failures;
    test.run();
    ++count;
    if (failures != before) std::fprintf(stderr, "%s failed\n", test.name);
  }
  CHECK(count > 0);
  return summary(name.c_str());
}
