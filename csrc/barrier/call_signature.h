// A call that several processes share, described in the same way on all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace jaxmp {

// One call of one program. Processes meet at equal calls: they have equal `fields`, one "name=value" a line, the same
// number of calls with these fields earlier in the program (`repeat`), and the same devices. The program's name does
// not count.
struct CallSignature {
  std::string program;
  int64_t index = 0;   // among all calls of the program
  int64_t repeat = 0;  // its place among the program's calls with equal fields
  std::string call;    // for people: "matmul at train.py:41"
  std::string fields;
  std::vector<int64_t> devices, processes, groups;  // by position in the mesh
  // Whether each process has a single device in all: its programs then run one after the other, and two processes that
  // wait for each other in different programs disagree.
  bool is_sequential = false;
  // Whether each device brings a token that all the others get, so that a process has come only with its last device.
  bool has_tokens = false;

  // Derived by Prepare().
  struct Group {
    std::vector<int> processes;      // distinct, ascending
    std::vector<int64_t> positions;  // in the mesh
    uint64_t key = 0;                // of what makes calls equal
    uint64_t place = 0;              // of the program, the index and the devices
    uint64_t circle = 0;             // of the processes
  };
  std::vector<Group> members;  // by group
  uint64_t program_hash = 0;
  uint64_t digest = 0;  // of what people are told: the call and its fields
};

// From where a device comes to a call: the instruction of an executable, and XLA's number of the run. The number is
// the same on every process that runs an equal program.
struct Origin {
  const void* instruction = nullptr;
  int64_t run = 0;
};

// Checks the signature and fills in what is derived.
StatusOr<std::shared_ptr<const CallSignature>> Prepare(CallSignature signature);

// Names a set of processes, ascending.
uint64_t CircleOf(const std::vector<int>& processes);

// Returns "rank 2 has k=4096, rank 0 has k=4095", for every field that both have with different values.
std::string Differences(int one, const std::string& fields, int other, const std::string& other_fields);

}  // namespace jaxmp
