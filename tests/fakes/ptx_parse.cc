#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tests/fakes/ptx.h"

namespace fakes::ptx {
namespace {

constexpr const char* kSpace = " \t\r\n";

std::string Trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// At every `by` outside of brackets and braces.
std::vector<std::string> Split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c == by && depth == 0) {
      parts.push_back(Trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!Trim(part).empty()) parts.push_back(Trim(part));
  return parts;
}

std::optional<Type> TypeOf(const std::string& text) {
  if (text == "pred") return Type{'p', 1};
  if (text == "bf16") return Type{'h', 16};
  if (text.size() < 2 || !std::strchr("bsuf", text[0])) return std::nullopt;
  const std::string digits = text.substr(1);
  for (const char* bits : {"8", "16", "32", "64", "128"}) {
    if (digits == bits) return Type{text[0], std::atoi(bits)};
  }
  return std::nullopt;
}

uint64_t Number(const std::string& text) {
  const bool is_float = text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1]);  // its bits in hexadecimal
  if (is_float) return std::strtoull(text.c_str() + 2, nullptr, 16);
  if (text[0] == '-') return static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 0));
  return std::strtoull(text.c_str(), nullptr, 0);
}

// ".shared .align 16 .b8 name[128]", with or without "= {1, 2}".
Variable ParseVariable(const std::string& text) {
  const size_t equals = text.find('=');
  Variable variable;
  size_t unit = 0;
  std::string declared = Trim(text.substr(0, equals));
  for (const std::string& word : Split(declared, ' ')) {
    if (word.empty()) continue;
    if (word[0] != '.') {
      const size_t bracket = word.find('[');
      if (std::isdigit(static_cast<unsigned char>(word[0]))) continue;  // the alignment
      variable.name = word.substr(0, bracket);
      variable.bytes = unit * (bracket == std::string::npos ? 1 : Number(word.substr(bracket + 1)));
    } else if (const auto type = TypeOf(word.substr(1))) {
      unit = type->bytes();
    }
  }
  if (variable.name.empty() || unit == 0) throw std::runtime_error("variable " + text);
  if (equals == std::string::npos) return variable;
  std::string values = Trim(text.substr(equals + 1));
  if (values.front() == '{') values = values.substr(1, values.rfind('}') - 1);
  variable.initial.resize(variable.bytes);
  size_t at = 0;
  for (const std::string& item : Split(values, ',')) {
    const uint64_t value = Number(item);
    if (at + unit <= variable.bytes) std::memcpy(&variable.initial[at], &value, unit);
    at += unit;
  }
  return variable;
}

// The body of one kernel, statement by statement.
class Body {
 public:
  explicit Body(Kernel* kernel) : kernel_(*kernel) {}

  void Add(const std::string& statement) {
    std::string text = Trim(statement);
    while (!text.empty() && (text[0] == '}' || (text[0] == '{' && text.find('}') == std::string::npos))) {
      text = Trim(text.substr(1));  // a scope
    }
    if (text.empty()) return;
    if (text[0] == '.') return Declare(text);
    kernel_.code.push_back(Parse(text));
  }
  void Label(const std::string& name) { kernel_.labels[Trim(name)] = kernel_.code.size(); }

 private:
  int RegisterOf(const std::string& name) {
    return kernel_.registers.emplace(name, static_cast<int>(kernel_.registers.size())).first->second;
  }

  void Declare(const std::string& text) {
    if (text.compare(0, 7, ".shared") == 0) kernel_.shared.push_back(ParseVariable(text));
  }

  Instruction Parse(std::string text) {
    Instruction instruction;
    instruction.text = text;
    if (text[0] == '@') {
      const size_t end = text.find_first_of(kSpace);
      instruction.is_guard_negated = text[1] == '!';
      const size_t begin = instruction.is_guard_negated ? 2 : 1;
      instruction.guard = RegisterOf(text.substr(begin, end - begin));
      text = Trim(text.substr(end));
    }
    const size_t end = text.find_first_of(kSpace);
    std::vector<std::string> words = Split(text.substr(0, end), '.');
    instruction.op = words[0];
    for (size_t i = 1; i < words.size(); ++i) {
      const std::string word = words[i].substr(0, words[i].find("::"));  // "shared::cta"
      if (const auto type = TypeOf(word)) {
        instruction.types.push_back(*type);
      } else {
        instruction.modifiers.push_back(word);
      }
    }
    if (end == std::string::npos) return instruction;
    for (const std::string& operand : Split(text.substr(end), ','))
      instruction.operands.push_back(ParseOperand(operand));
    return instruction;
  }

  Operand ParseOperand(const std::string& text) {
    Operand operand;
    if (text[0] == '[') {
      const std::string inside = Trim(text.substr(1, text.size() - 2));
      const size_t plus = inside.find('+', 1);
      operand = ParseOperand(Trim(inside.substr(0, plus)));
      if (plus != std::string::npos) operand.offset = static_cast<int64_t>(Number(Trim(inside.substr(plus + 1))));
      return operand;
    }
    if (text[0] == '{') {
      operand.kind = Operand::Kind::kVector;
      for (const std::string& part : Split(text.substr(1, text.size() - 2), ',')) {
        operand.parts.push_back(ParseOperand(part));
      }
      return operand;
    }
    if (text[0] == '%' && IsSpecial(text)) {
      operand.kind = Operand::Kind::kSpecial;
      operand.name = text;
      return operand;
    }
    if (text[0] == '%' || text == "_") {
      operand.kind = Operand::Kind::kRegister;
      operand.number = RegisterOf(text.substr(0, text.find('|')));  // a second predicate is nobody's
      return operand;
    }
    if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      operand.value = Number(text);
      return operand;
    }
    operand.kind = Operand::Kind::kSymbol;
    operand.name = text;
    return operand;
  }

  static bool IsSpecial(const std::string& text) { return text == "%tid.x" || text == "%ctaid.x"; }

  Kernel& kernel_;
};

// "name" and "[count]" of ".param .align 8 .b8 name[16]".
Parameter ParseParameter(const std::string& text, size_t offset) {
  const Variable variable = ParseVariable(text);
  return {variable.name, (offset + 15) / 16 * 16, variable.bytes};
}

std::string WithoutComments(const std::string& source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source.compare(i, 2, "//") == 0) i = std::min(source.find('\n', i), source.size() - 1);
    text += source[i];
  }
  return text;
}

size_t EndOfScope(const std::string& text, size_t begin) {
  int depth = 0;
  for (size_t at = begin; at < text.size(); ++at) {
    depth += (text[at] == '{') - (text[at] == '}');
    if (depth == 0) return at;
  }
  throw std::runtime_error("a scope without an end");
}

// A kernel from ".entry" on; `end` becomes the place behind it.
Kernel ParseKernel(const std::string& text, size_t entry, size_t* end) {
  Kernel kernel;
  const size_t body = text.find('{', entry), open = text.find('(', entry);
  const bool has_parameters = open < body;
  const size_t name = entry + std::strlen(".entry");
  kernel.name = Trim(text.substr(name, std::min(open, body) - name));
  if (has_parameters) {
    for (const std::string& parameter : Split(text.substr(open + 1, text.find(')', open) - open - 1), ',')) {
      kernel.parameters.push_back(ParseParameter(parameter, kernel.parameter_bytes()));
    }
  }
  *end = EndOfScope(text, body) + 1;
  Body code(&kernel);
  std::string statement;
  for (size_t at = body + 1; at + 1 < *end; ++at) {
    const std::string trimmed = text[at] == ':' ? Trim(statement) : "";
    if (text[at] == ';') {
      code.Add(statement);
      statement.clear();
    } else if (!trimmed.empty() && trimmed[trimmed.find_first_not_of("{} \t\r\n")] == '$') {
      code.Label(trimmed.substr(trimmed.find('$')));
      statement.clear();
    } else {
      statement += text[at];
    }
  }
  return kernel;
}

}  // namespace

bool Instruction::has(const char* modifier) const {
  return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

std::shared_ptr<const Module> Parse(const std::string& source) {
  const std::string text = WithoutComments(source);
  auto module = std::make_shared<Module>();
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find_first_of(";({\n", at);
    if (end == std::string::npos) break;
    const std::string head = text.substr(at, end - at);
    const bool is_shared = head.find(".shared ") != std::string::npos;
    if (const size_t entry = head.find(".entry"); entry != std::string::npos) {
      const Kernel kernel = ParseKernel(text, at + entry, &at);
      module->kernels[kernel.name] = kernel;
    } else if (is_shared || head.find(".global ") != std::string::npos || head.find(".const ") != std::string::npos) {
      const size_t semicolon = text.find(';', at);
      (is_shared ? module->shared : module->globals).push_back(ParseVariable(text.substr(at, semicolon - at)));
      at = semicolon + 1;
    } else {
      at = end + 1;
    }
  }
  return module;
}

}  // namespace fakes::ptx
