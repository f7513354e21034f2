// All floats as amax: the E8M0 scale by integers against the scale by the conversion that rounds up
// to a power of two, for the three element formats that it serves, on all
// cores. A minute; built and run by the
// target `exhaustive` only.
#include <thread>
#include <vector>

#include "harness.h"
#include "minifloat/core/scaling.h"

namespace minifloat {
namespace {

template <class F>
Tally tally_of(std::uint32_t begin, std::uint32_t end) {
  Tally tally;
  for (std::uint32_t amax = begin; amax < end; ++amax) {
    const std::uint32_t rounded = oracle::ue8m0_rounded_up(mx_quotient<F>(amax));
    const std::uint32_t got = mx_scale_of_rounded<F>(rounded, amax);
    tally.check(got == mx_scale_up<F>(amax), [&] {
      char text[80];
      std::snprintf(text, sizeof text, "amax %a got code %u", oracle::from_bits(amax), got);
      return std::string(text);
    });
  }
  return tally;
}

template <class F>
class EveryAmax : public ::testing::Test {};
using Formats = ::testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(EveryAmax, Formats, FormatName);

TYPED_TEST(EveryAmax, HasTheScaleOfTheConversion) {
  constexpr std::uint64_t kAmaxes = std::uint64_t{1} << 31;  // infinity and NaN among them
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Tally> tallies(threads);
  std::vector<std::thread> team;
  for (unsigned t = 0; t < threads; ++t)
    team.emplace_back([=, &tallies] {
      tallies[t] = tally_of<TypeParam>(static_cast<std::uint32_t>(kAmaxes * t / threads),
                                       static_cast<std::uint32_t>(kAmaxes * (t + 1) / threads));
    });
  for (std::thread& member : team) member.join();
  Tally all;
  for (const Tally& tally : tallies) all.merge(tally);
  EXPECT_TRUE(all.none_wrong());
}

}  // namespace
}  // namespace minifloat
