// Products that run while XLA goes on: a result of another ticket, or of operands that XLA has reused, would be
// silently wrong; a ticket that is never collected would never be freed.
#include "csrc/ffi/deferred_product.h"

#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"
#include "tests/cpp/world.h"

namespace jaxmp {
namespace {

TEST(LoadsTheBlas) {
  check::load_blas();
  check::limit_instruction_set();
}

struct Chain {
  explicit Chain(const std::string& kept, int64_t extent = 64)
      : attributes(tests::Local(extent, extent / 2, extent * 2)),
        instance(
            fake_xla::InstantiateWith<DeferredSite>(DeferredInstantiate, tests::With(attributes, {{"kept", kept}}))) {}

  tests::World NewWorld(int salt) const { return tests::World(*MakeProblem(attributes), salt); }

  // The ticket; the operands are overwritten at once.
  uint64_t Start(tests::World& world, uint64_t ahead = 0, int64_t run_id = 1, int32_t device = 0) {
    std::vector<float> a = world.a[0], b = world.b[0];
    uint64_t ticket = 0;
    int32_t next = 17, copied = 0;
    CHECK_EQ(Execute(StartExecute, {fake_xla::F32(a), fake_xla::F32(b), Ticket(ahead), Next(next)},
                     {Ticket(ticket), Next(copied)}, run_id, device),
             "");
    CHECK_EQ(copied, 17);
    for (auto* operand : {&a, &b}) operand->assign(operand->size(), std::numeric_limits<float>::quiet_NaN());
    return ticket;
  }

  bool CollectIsRight(tests::World& world, uint64_t ticket) {
    CHECK_EQ(Collect(world, ticket), "");
    return world.IsRight();
  }
  std::string Collect(tests::World& world, uint64_t ticket) {
    int32_t after = 0;
    return Execute(CollectExecute, {fake_xla::F32(world.a[0]), fake_xla::F32(world.b[0]), Ticket(ticket), Next(after)},
                   {fake_xla::F32(world.d[0])}, 1, 0);
  }

  std::string Execute(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), std::vector<fake_xla::Buffer> args,
                      std::vector<fake_xla::Buffer> rets, int64_t run_id, int32_t device) {
    fake_xla::Context context;
    context.state = instance.site.get();
    context.run_id = run_id;
    context.ordinal = device;
    fake_xla::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
    frame.SetBuffers(std::move(args), std::move(rets));
    std::string error = fake_xla::Take(handler(frame.get()));
    CHECK(frame.get()->future == nullptr);  // nothing is ever pending
    return error;
  }
  static fake_xla::Buffer Ticket(uint64_t& ticket) { return {XLA_FFI_DataType_U64, {1}, &ticket}; }
  static fake_xla::Buffer Next(int32_t& next) { return {XLA_FFI_DataType_S32, {}, &next}; }

  const Attributes attributes;
  fake_xla::InstanceOf<DeferredSite> instance;
};

TEST(ProductsOfAChainKeepWhatTheyStartedWith) {
  for (const char* kept : {"a", "b"}) {
    for (const int64_t extent : {8, 64, check::kIsSlow ? 256 : 1024}) {
      Chain chain(kept, extent);
      std::vector<tests::World> worlds;
      std::vector<uint64_t> tickets;
      for (int i = 0; i < 4; ++i) {
        worlds.push_back(chain.NewWorld(i));
        (*kept == 'a' ? worlds[i].a : worlds[i].b) = (*kept == 'a' ? worlds[0].a : worlds[0].b);
        tickets.push_back(chain.Start(worlds[i], i ? tickets.back() : 0));
      }
      for (int i : {2, 0, 3, 1}) {  // in any order
        CHECK_EQ(chain.Collect(worlds[i], tickets[i]), "");
        tests::World alone = worlds[i];
        CHECK_EQ(chain.Collect(alone, 0), "");
        CHECK(worlds[i].d == alone.d);
        if (i == 0) CHECK(worlds[i].IsRight());
      }
    }
  }
}

TEST(WhatHasNoProductIsMultiplied) {
  Chain chain("a");
  tests::World world = chain.NewWorld(1), other = chain.NewWorld(2);
  for (const uint64_t ticket : {uint64_t{0}, std::numeric_limits<uint64_t>::max()}) {
    CHECK(chain.CollectIsRight(world, ticket));
  }
  const uint64_t ticket = chain.Start(world);
  CHECK(chain.CollectIsRight(world, ticket));
  world.d[0].assign(world.d[0].size(), 0);
  CHECK(chain.CollectIsRight(world, ticket));  // twice
  // A ticket that does not exist any more is no previous product either.
  CHECK(chain.CollectIsRight(other, chain.Start(other, ticket)));
}

TEST(WhatARunLeavesBehindIsFreedByTheNext) {
  Chain chain("b");
  tests::World world = chain.NewWorld(1);
  const std::weak_ptr<Plan> plan = chain.instance.site->plan;
  const uint64_t left = chain.Start(world, 0, /*run_id=*/1), elsewhere = chain.Start(world, 0, 1, /*device=*/1);
  const uint64_t next = chain.Start(world, 0, /*run_id=*/2);
  CHECK(next != left && left != elsewhere);
  for (auto* operand : {&world.a[0], &world.b[0]}) operand->assign(operand->size(), 0);  // shows who multiplies
  for (const auto& [ticket, is_there] : {std::pair(left, false), {elsewhere, true}, {next, true}}) {
    CHECK_EQ(chain.Collect(world, ticket), "");
    bool is_zero = true;
    for (const float d : world.d[0]) is_zero = is_zero && d == 0;
    CHECK_EQ(is_zero, !is_there);
  }
}

TEST(MemoryIsKeptForTheNextProductAndGivenBack) {
  Chain chain("a");
  tests::World world = chain.NewWorld(1);
  TrimProducts(0);
  for (int i = 0; i < 20; ++i) CHECK(chain.CollectIsRight(world, chain.Start(world)));
  while (TrimProducts(60) == 0) std::this_thread::yield();  // the thread still has them
  const size_t size = 4 * (world.a[0].size() + world.b[0].size() + world.d[0].size());
  CHECK(TrimProducts(60) <= 3 * size);  // not 20 times
  while (TrimProducts(0)) std::this_thread::yield();
}

TEST(WrongFramesAreRefused) {
  const auto why = [](const Attributes& attributes) {
    return fake_xla::InstantiateWith<DeferredSite>(DeferredInstantiate, attributes).error;
  };
  const Attributes local = tests::Local(4, 4, 4), kept = {{"kept", std::string("a")}};
  CHECK_CONTAINS(why(local), "attribute kept is missing");
  CHECK_CONTAINS(why(tests::With(tests::Local(0, 4, 4), kept)), "has one rank, and d");
  CHECK_CONTAINS(why(tests::With(tests::AllGather(2, 4, 4, 4), kept)), "has one rank, and d");
  Chain chain("a", 8);
  tests::World world = chain.NewWorld(1);
  CHECK_CONTAINS(chain.Execute(StartExecute, {fake_xla::F32(world.a[0])}, {}, 1, 0), "start takes 4 arguments");
  CHECK_CONTAINS(chain.Execute(CollectExecute, {fake_xla::F32(world.a[0])}, {}, 1, 0), "collect takes 4 arguments");
  world.a[0].pop_back();
  CHECK_CONTAINS(chain.Collect(world, 0), "jaxmp: a must hold");
}

}  // namespace
}  // namespace jaxmp
