// All 2^32 floats: nearest rounding to E4M3, E5M2, E2M1 and E1M2, and stochastic rounding with one
// random word a float, against the oracle, on all cores. Minutes; built and run by the target
// `exhaustive` only.
#include <thread>
#include <vector>

#include "harness.h"
#include "minifloat/core/rounding.h"

namespace minifloat {
namespace {

template <class Check>
Tally for_all_floats(Check check) {
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Tally> tallies(threads);
  std::vector<std::thread> team;
  for (unsigned t = 0; t < threads; ++t)
    team.emplace_back([=, &tallies] {
      Tally mine;  // one a thread, so that no cache line is shared
      const std::uint64_t begin = (std::uint64_t{1} << 32) * t / threads;
      const std::uint64_t end = (std::uint64_t{1} << 32) * (t + 1) / threads;
      for (std::uint64_t bits = begin; bits < end; ++bits)
        check(oracle::from_bits(static_cast<std::uint32_t>(bits)), mine);
      tallies[t] = mine;
    });
  for (std::thread& member : team) member.join();
  Tally all;
  for (const Tally& tally : tallies) all.merge(tally);
  return all;
}

template <class F>
class EveryFloat : public ::testing::Test {};
TYPED_TEST_SUITE(EveryFloat, ElementFormats, FormatName);

TYPED_TEST(EveryFloat, RoundsToNearest) {
  using F = TypeParam;
  const oracle::Grid& g = grid<F>();
  const Tally tally =
      for_all_floats([&g](float x, Tally& t) { t.check_code(x, encode<F>(x), g.nearest(x)); });
  EXPECT_TRUE(tally.none_wrong());
  EXPECT_EQ(tally.checked(), std::int64_t{1} << 32);
}

TYPED_TEST(EveryFloat, RoundsStochastically) {
  using F = TypeParam;
  const oracle::Grid& g = grid<F>();
  const Tally tally = for_all_floats([&g](float x, Tally& t) {
    const std::uint32_t random = spread(oracle::to_bits(x)) >> 16;
    t.check_code(x, encode<F>(x, Stochastic{random << 16}), g.stochastic(x, random));
  });
  EXPECT_TRUE(tally.none_wrong());
  EXPECT_EQ(tally.checked(), std::int64_t{1} << 32);
}

}  // namespace
}  // namespace minifloat
