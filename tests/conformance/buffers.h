// The buffers of one rank in one case, and the judgement of what the call leaves in them.
#ifndef JAXMP_TESTS_CONFORMANCE_BUFFERS_H_
#define JAXMP_TESTS_CONFORMANCE_BUFFERS_H_

#include <array>

#include "tests/conformance/memory.h"
#include "tests/conformance/operands.h"

namespace jaxmp::conformance {

// The judgement of one result: `worst` is the largest error in units of the allowed one, 0 if every element is right.
struct Verdict {
  bool is_exact = true;
  double worst = 0;
  void add(Number got, Number want, double allowed);
};

class Buffers {
 public:
  // This rank's part of the operands, and room for its part of the results.
  Buffers(const Case& c, const Operands& operands, Rank* rank, int number);

  Status write();
  Status read();
  bool is_memory_intact() const;
  std::map<std::string, Verdict> judge(const Expected& expected, bool is_host) const;

  const void* given_c() const { return !c_.has_c ? nullptr : c_.is_in_place ? d.get() : c.get(); }
  int64_t lld(const test::Layout& layout) const;

  Buffer a, b, c, d, bias, aux, gradient, scale_a, scale_b, scale_c, scale_d, scale_aux, amax, amax_aux, d_out_scale;
  test::Layouts layouts;
  int64_t aux_ld = 0;

 private:
  Buffer scatter(const Matrix& whole, const test::Layout& layout, cudaDataType_t type);
  Buffer scatter_scales(const test::Layout& layout, int mode, unsigned seed, bool is_inner_row);
  Buffer scalar(double value);
  void make_epilog(const Operands& operands);
  void put_aux(const Matrix& aux);
  bool holds_row(int64_t i) const;
  std::array<Buffer*, 15> all();
  Verdict judge_d(const Expected& expected) const;
  Verdict judge_blocks(const Expected& expected) const;
  Verdict judge_aux(const Expected& expected, bool is_host) const;
  Verdict judge_gradient(const Expected& expected) const;
  Verdict judge_amax(const Matrix& whole, const Buffer& buffer) const;

  const Case& c_;
  Rank* rank_;
  int number_;
};

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_BUFFERS_H_
