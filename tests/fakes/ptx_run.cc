#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "tests/fakes/ptx.h"

namespace fakes::ptx {
namespace {

#if defined(__aarch64__)
using Half = __fp16;  // GCC has _Float16 in C++ for this processor from 13 on
#else
using Half = _Float16;
#endif

[[noreturn]] void Fail(const std::string& why) { throw std::runtime_error(why); }

// ---- values: the bits of any type in 64

double ToDouble(uint64_t bits, Type type) {
  const auto read = [](uint64_t from, auto value) {
    std::memcpy(&value, &from, sizeof(value));
    return static_cast<double>(value);
  };
  if (type.kind == 'h') return read(bits << 16, float{});  // the upper half of a float
  return type.bits == 64 ? read(bits, double{}) : type.bits == 32 ? read(bits, float{}) : read(bits, Half{});
}

uint64_t FromDouble(double value, Type type) {
  uint64_t bits = 0;
  const auto write = [&bits](auto narrow) {
    std::memcpy(&bits, &narrow, sizeof(narrow));
    return bits;
  };
  if (type.bits == 64) return write(value);
  if (type.kind == 'f') return type.bits == 32 ? write(static_cast<float>(value)) : write(static_cast<Half>(value));
  if (std::isnan(value)) return 0x7fff;
  (void)write(static_cast<float>(value));
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, and to even between two
}

// The type's bits, with its sign where it has one.
uint64_t Narrow(uint64_t value, Type type) {
  if (type.kind == 'p') return value & 1;
  if (type.bits >= 64) return value;
  const int rest = 64 - type.bits;
  if (type.kind == 's') return static_cast<uint64_t>(static_cast<int64_t>(value << rest) >> rest);
  return value << rest >> rest;
}

uint64_t Unsigned(uint64_t value, int bits) { return Narrow(value, {'u', bits}); }

template <typename T>
bool IsOrdered(const std::string& how, T x, T y) {
  if (how == "lt") return x < y;
  if (how == "le") return x <= y;
  if (how == "gt") return x > y;
  if (how == "ge") return x >= y;
  if (how == "eq") return x == y;
  if (how == "ne") return x != y;
  Fail("comparison " + how);
}

bool Compare(std::string how, uint64_t x, uint64_t y, Type type) {
  if (!type.is_float()) {
    x = Narrow(x, type), y = Narrow(y, type);
    return type.kind == 's' ? IsOrdered(how, static_cast<int64_t>(x), static_cast<int64_t>(y)) : IsOrdered(how, x, y);
  }
  const double a = ToDouble(x, type), b = ToDouble(y, type);
  const bool is_nan = std::isnan(a) || std::isnan(b);
  if (how == "nan" || how == "num") return is_nan == (how == "nan");
  const bool is_unordered = how.size() == 3;  // "ltu"
  if (is_nan) return is_unordered;
  if (is_unordered) how.pop_back();
  return IsOrdered(how, a, b);
}

// ---- one block of threads

struct Thread {
  enum class State { kRunning, kAtBarrier, kAtShuffle, kDone };
  unsigned x = 0;
  size_t at = 0;  // in the code
  State state = State::kRunning;
  std::vector<uint64_t> registers;
};

class Block {
 public:
  Block(const Kernel& kernel, unsigned threads, const std::vector<char>& parameters,
        const std::map<std::string, void*>& symbols)
      : kernel_(kernel), parameters_(parameters), symbols_(symbols), threads_(threads) {}

  void Run(unsigned position) {
    position_ = position;
    for (unsigned x = 0; x < threads_.size(); ++x) {
      threads_[x] = Thread();
      threads_[x].x = x;
      threads_[x].registers.resize(kernel_.registers.size());
    }
    for (;;) {
      for (Thread& thread : threads_) {
        while (thread.state == Thread::State::kRunning) Step(thread);
      }
      if (ShuffleAll()) continue;
      bool is_done = true;
      for (Thread& thread : threads_) {
        if (thread.state != Thread::State::kAtBarrier) continue;
        thread.state = Thread::State::kRunning;
        is_done = false;
      }
      if (is_done) return;
    }
  }

 private:
  uint64_t Special(const std::string& name, const Thread& thread) const {
    return name == "%tid.x" ? thread.x : position_;
  }

  uint64_t Symbol(const std::string& name) const {
    if (const auto found = symbols_.find(name); found != symbols_.end())
      return reinterpret_cast<uint64_t>(found->second);
    for (const Parameter& parameter : kernel_.parameters) {
      if (parameter.name == name) return reinterpret_cast<uint64_t>(parameters_.data() + parameter.offset);
    }
    Fail("symbol " + name);
  }

  uint64_t Get(const Operand& operand, Thread& thread) const {
    switch (operand.kind) {
      case Operand::Kind::kRegister:
        return thread.registers[static_cast<size_t>(operand.number)];
      case Operand::Kind::kImmediate:
        return operand.value;
      case Operand::Kind::kSpecial:
        return Special(operand.name, thread);
      case Operand::Kind::kSymbol:
        return Symbol(operand.name);
      case Operand::Kind::kVector:
        break;
    }
    Fail("a vector for a value");
  }
  static void Put(const Operand& to, uint64_t value, Thread& thread) {
    thread.registers[static_cast<size_t>(to.number)] = value;
  }
  char* Address(const Operand& operand, Thread& thread) const {
    return reinterpret_cast<char*>(Get(operand, thread) + static_cast<uint64_t>(operand.offset));
  }

  void Step(Thread& thread) {
    if (thread.at >= kernel_.code.size()) {
      thread.state = Thread::State::kDone;
      return;
    }
    const Instruction& i = kernel_.code[thread.at++];
    if (i.guard >= 0 && (thread.registers[static_cast<size_t>(i.guard)] != 0) == i.is_guard_negated) return;
    try {
      if (Control(i, thread) || Move(i, thread)) return;
      Put(i.operands[0], i.type().is_float() ? Float(i, thread) : Integer(i, thread), thread);
    } catch (const std::runtime_error& error) {
      Fail(i.text + " (" + error.what() + ")");
    }
  }

  bool Control(const Instruction& i, Thread& thread) {
    if (i.op == "ret" || i.op == "exit") {
      thread.state = Thread::State::kDone;
    } else if (i.op == "bra") {
      thread.at = kernel_.labels.at(i.operands[0].name);
    } else if (i.op == "bar" || i.op == "barrier") {
      thread.state = Thread::State::kAtBarrier;
    } else if (i.op == "shfl" || i.op == "redux") {
      --thread.at;
      thread.state = Thread::State::kAtShuffle;
    } else {
      return i.op == "griddepcontrol" || i.op == "membar" || i.op == "fence";
    }
    return true;
  }

  // Everything that a type's arithmetic has no part in.
  bool Move(const Instruction& i, Thread& thread) {
    const auto& operands = i.operands;
    const auto get = [&](size_t n) { return Get(operands[n], thread); };
    if (i.op == "ld" || i.op == "ldu" || i.op == "st") {
      Transfer(i, thread);
    } else if (i.op == "mov") {
      MoveBits(i, thread);
    } else if (i.op == "cvta") {
      Put(operands[0], get(1), thread);
    } else if (i.op == "selp") {
      Put(operands[0], get(3) & 1 ? get(1) : get(2), thread);
    } else if (i.op == "setp") {
      bool is_so = Compare(i.modifiers.at(0), get(1), get(2), i.type());
      if (operands.size() > 3) {
        const bool other = get(3) & 1;
        is_so = i.has("and") ? is_so && other : i.has("or") ? is_so || other : is_so != other;
      }
      Put(operands[0], is_so, thread);
    } else if (i.op == "cvt") {
      Put(operands[0], Convert(i, thread), thread);
    } else {
      return false;
    }
    return true;
  }

  void Transfer(const Instruction& i, Thread& thread) const {
    const bool is_load = i.op != "st";
    const Operand& values = i.operands[is_load ? 0 : 1];
    char* at = Address(i.operands[is_load ? 1 : 0], thread);
    const size_t bytes = i.type().bytes();
    const std::vector<Operand> one = {values};
    for (const Operand& value : values.kind == Operand::Kind::kVector ? values.parts : one) {
      uint64_t bits = is_load ? 0 : Get(value, thread);
      std::memcpy(is_load ? static_cast<void*>(&bits) : at, is_load ? at : static_cast<void*>(&bits), bytes);
      if (is_load) Put(value, i.type().kind == 's' ? Narrow(bits, i.type()) : bits, thread);
      at += bytes;
    }
  }

  void MoveBits(const Instruction& i, Thread& thread) const {
    const Operand &to = i.operands[0], &from = i.operands[1];
    if (to.kind == Operand::Kind::kVector) {
      const int bits = i.type().bits / static_cast<int>(to.parts.size());
      const uint64_t value = Get(from, thread);
      for (size_t part = 0; part < to.parts.size(); ++part) {
        Put(to.parts[part], Unsigned(value >> (part * static_cast<size_t>(bits)), bits), thread);
      }
    } else if (from.kind == Operand::Kind::kVector) {
      const int bits = i.type().bits / static_cast<int>(from.parts.size());
      uint64_t value = 0;
      for (size_t part = 0; part < from.parts.size(); ++part) {
        value |= Unsigned(Get(from.parts[part], thread), bits) << (part * static_cast<size_t>(bits));
      }
      Put(to, value, thread);
    } else {
      Put(to, Get(from, thread), thread);
    }
  }

  uint64_t Convert(const Instruction& i, Thread& thread) const {
    if (i.types.size() < 2) Fail("types");
    const Type to = i.types[0], from = i.types[1];
    const uint64_t bits = Get(i.operands[1], thread);
    if (!from.is_float()) {
      const uint64_t value = Narrow(bits, from);
      if (!to.is_float()) return Unsigned(Narrow(value, to), to.bits < 32 ? 32 : to.bits);
      return FromDouble(
          from.kind == 's' ? static_cast<double>(static_cast<int64_t>(value)) : static_cast<double>(value), to);
    }
    double value = ToDouble(bits, from);
    if (!to.is_float() || i.has("rni") || i.has("rzi") || i.has("rmi") || i.has("rpi")) Fail("to an integer");
    if (i.has("sat")) value = std::isnan(value) ? 0 : std::clamp(value, 0.0, 1.0);
    return FromDouble(value, to);
  }

  uint64_t Float(const Instruction& i, Thread& thread) const {
    const Type type = i.type();
    const auto get = [&](size_t n) { return n < i.operands.size() ? ToDouble(Get(i.operands[n], thread), type) : 0.0; };
    const double x = get(1), y = get(2);
    const std::string& op = i.op;
    // One rounding: the sum, product or quotient of two floats in double rounds to float as if at once.
    if (op == "add") return FromDouble(x + y, type);
    if (op == "sub") return FromDouble(x - y, type);
    if (op == "mul") return FromDouble(x * y, type);
    if (op == "div") return FromDouble(x / y, type);
    if (op == "fma" || op == "mad") {
      if (type.bits == 32) return FromDouble(std::fmaf(float(x), float(y), float(get(3))), type);
      return FromDouble(std::fma(x, y, get(3)), type);
    }
    if (op == "neg") return FromDouble(-x, type);
    if (op == "abs") return FromDouble(std::fabs(x), type);
    if (op == "min" || op == "max") {
      const bool is_nan = std::isnan(x) || std::isnan(y);
      if (is_nan && i.has("NaN")) return FromDouble(std::numeric_limits<double>::quiet_NaN(), type);
      return FromDouble(op == "min" ? std::fmin(x, y) : std::fmax(x, y), type);
    }
    if (op == "rcp") return FromDouble(1 / x, type);
    if (op == "ex2") return FromDouble(std::exp2(x), type);
    Fail("unknown instruction");
  }

  uint64_t Integer(const Instruction& i, Thread& thread) const {
    const Type type = i.type();
    const auto raw = [&](size_t n) { return n < i.operands.size() ? Get(i.operands[n], thread) : 0; };
    const uint64_t x = Narrow(raw(1), type), y = Narrow(raw(2), type);
    const auto sx = static_cast<int64_t>(x), sy = static_cast<int64_t>(y);
    const bool is_signed = type.kind == 's';
    const auto whole = [&](uint64_t value) { return type.kind == 'p' ? value & 1 : Unsigned(value, type.bits); };
    const std::string& op = i.op;
    if (op == "add") return whole(x + y);
    if (op == "sub") return whole(x - y);
    if (op == "mul" || op == "mad") {
      const uint64_t added = op == "mad" ? raw(3) : 0;
      if (i.has("wide")) return Unsigned(x * y + added, 2 * type.bits);
      if (!i.has("hi")) return whole(x * y + added);
      const auto high = is_signed ? static_cast<uint64_t>(static_cast<__int128>(sx) * sy >> type.bits)
                                  : static_cast<uint64_t>(static_cast<unsigned __int128>(x) * y >> type.bits);
      return whole(high + added);
    }
    if (op == "neg") return whole(0 - x);
    if (op == "min") return whole(Compare("lt", x, y, type) ? x : y);
    if (op == "max") return whole(Compare("gt", x, y, type) ? x : y);
    if (op == "and") return whole(x & y);
    if (op == "or") return whole(x | y);
    if (op == "xor") return whole(x ^ y);
    if (op == "not") return whole(~x);
    if (op == "shl" || op == "shr") {
      const uint64_t by = Unsigned(raw(2), 32);
      const auto bits = static_cast<uint64_t>(type.bits);
      if (op == "shl") return by >= bits ? 0 : whole(x << by);
      if (is_signed) return whole(static_cast<uint64_t>(sx >> std::min<uint64_t>(by, 63)));
      return by >= bits ? 0 : whole(x >> by);
    }
    if (op == "shf") {
      const uint64_t both = Unsigned(raw(1), 32) | raw(2) << 32, by = raw(3) & 31;
      return Unsigned(i.has("l") ? both << by >> 32 : both >> by, 32);
    }
    Fail("unknown instruction");
  }

  // The warps whose threads wait in a shuffle or a reduction; false where none does.
  bool ShuffleAll() {
    bool found = false;
    for (size_t first = 0; first < threads_.size(); first += 32) {
      std::vector<Thread*> lanes;
      for (size_t i = first; i < std::min(first + 32, threads_.size()); ++i) {
        const bool waits = threads_[i].state == Thread::State::kAtShuffle;
        if (waits && (lanes.empty() || lanes[0]->at == threads_[i].at)) lanes.push_back(&threads_[i]);
      }
      if (!lanes.empty()) kernel_.code[lanes[0]->at].op == "redux" ? Reduce(lanes) : Shuffle(lanes);
      found = found || !lanes.empty();
    }
    return found;
  }

  // The sum of 32-bit integers over the lanes that have come.
  void Reduce(const std::vector<Thread*>& lanes) const {
    const Instruction& i = kernel_.code[lanes[0]->at];
    if (!i.has("add")) Fail("unknown reduction " + i.text);
    uint64_t sum = 0;
    for (Thread* thread : lanes) sum += Get(i.operands[1], *thread);
    for (Thread* thread : lanes) PutAndGoOn(i, Narrow(sum, i.type()), thread);
  }

  void Shuffle(const std::vector<Thread*>& lanes) const {
    const Instruction& i = kernel_.code[lanes[0]->at];
    if (!i.has("down") && !i.has("bfly")) Fail("unknown shuffle " + i.text);
    std::unordered_map<int, uint64_t> given;
    for (Thread* thread : lanes) given[LaneOf(*thread)] = Get(i.operands[1], *thread);
    for (Thread* thread : lanes) {
      const int lane = LaneOf(*thread), by = static_cast<int>(Get(i.operands[2], *thread));
      const int mask = static_cast<int>(Get(i.operands[3], *thread));
      const int clamp = mask & 31, segment = mask >> 8 & 31, last = (lane & segment) | (clamp & ~segment);
      const int from = i.has("down") ? lane + by : lane ^ by;
      const auto found = given.find(from <= last ? from : lane);
      PutAndGoOn(i, found == given.end() ? given[lane] : found->second, thread);
    }
  }

  static int LaneOf(const Thread& thread) { return static_cast<int>(thread.x % 32); }
  static void PutAndGoOn(const Instruction& i, uint64_t value, Thread* thread) {
    Put(i.operands[0], value, *thread);
    ++thread->at;
    thread->state = Thread::State::kRunning;
  }

  const Kernel& kernel_;
  const std::vector<char>& parameters_;
  const std::map<std::string, void*>& symbols_;
  unsigned position_ = 0;
  std::vector<Thread> threads_;
};

// Shared memory below 4 GiB, for kernels that keep its addresses in 32 bits.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes) {
#ifdef MAP_32BIT
    constexpr int kLow = MAP_32BIT;
#else
    constexpr int kLow = 0;
#endif
    void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | kLow, -1, 0);
    if (made == MAP_FAILED) Fail("no memory");
    data_ = static_cast<char*>(made);
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  char* data() const { return data_; }

 private:
  const size_t bytes_;
  char* data_;
};

}  // namespace

void Run(const Module& module, const Kernel& kernel, const Extent& grid, const Extent& block, size_t shared_bytes,
         const std::vector<char>& parameters, const std::map<std::string, void*>& globals) {
  constexpr size_t kAlignment = 256;
  std::map<std::string, size_t> offsets;
  size_t bytes = 0;
  for (const std::vector<Variable>* variables : {&module.shared, &kernel.shared}) {
    for (const Variable& variable : *variables) {
      offsets[variable.name] = bytes;
      bytes += (variable.bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  const SharedMemory shared(bytes + shared_bytes + kAlignment);
  std::map<std::string, void*> symbols = globals;
  for (const auto& [name, offset] : offsets) symbols[name] = shared.data() + offset;
  if (grid.count() != grid.x || block.count() != block.x) Fail("threads along y or z");
  Block one(kernel, block.x, parameters, symbols);
  for (unsigned x = 0; x < grid.x; ++x) one.Run(x);
}

}  // namespace fakes::ptx
