// PTX, read and interpreted as far as the kernels go that XLA writes for the programs of `make test-xla-gpu`: threads
// and blocks along x, element-wise programs, copies, transposes, and reductions within a block. One thread after the
// other, on the host: plain and slow.
#ifndef JAXMP_TESTS_FAKES_PTX_H_
#define JAXMP_TESTS_FAKES_PTX_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fakes::ptx {

// Of a value or an instruction: 'b' bits, 's' and 'u' integers, 'f' floats, 'h' bfloat16, 'p' a predicate.
struct Type {
  char kind = 'b';
  int bits = 32;
  bool is_float() const { return kind == 'f' || kind == 'h'; }
  size_t bytes() const { return static_cast<size_t>(bits <= 8 ? 1 : bits / 8); }
};

struct Operand {
  enum class Kind { kRegister, kImmediate, kSpecial, kSymbol, kVector };
  Kind kind = Kind::kImmediate;
  int number = 0;      // of the register
  uint64_t value = 0;  // immediate
  std::string name;    // special register, symbol or label
  std::vector<Operand> parts;
  int64_t offset = 0;  // of an address
};

struct Instruction {
  std::string text, op;
  std::vector<std::string> modifiers;  // what stands behind op, in order, without the types
  std::vector<Type> types;
  std::vector<Operand> operands;
  int guard = -1;  // register
  bool is_guard_negated = false;

  bool has(const char* modifier) const;
  Type type() const { return types.empty() ? Type() : types.back(); }
};

struct Variable {
  std::string name;
  size_t bytes = 0;
  std::vector<char> initial;  // empty: zeros
};

struct Parameter {
  std::string name;
  size_t offset = 0, bytes = 0;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::vector<Instruction> code;
  std::map<std::string, size_t> labels;  // index into code
  std::map<std::string, int> registers;  // number by name
  std::vector<Variable> shared;

  size_t parameter_bytes() const { return parameters.empty() ? 0 : parameters.back().offset + parameters.back().bytes; }
};

struct Module {
  std::map<std::string, Kernel> kernels;
  std::vector<Variable> globals, shared;
};

struct Extent {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

// Both throw std::runtime_error on what they do not know.
std::shared_ptr<const Module> Parse(const std::string& text);
void Run(const Module& module, const Kernel& kernel, const Extent& grid, const Extent& block, size_t shared_bytes,
         const std::vector<char>& parameters, const std::map<std::string, void*>& globals);

}  // namespace fakes::ptx

#endif  // JAXMP_TESTS_FAKES_PTX_H_
