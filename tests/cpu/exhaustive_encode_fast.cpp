// The fast encodings equal the definition on all 2^32 floats, with random bits that differ by
// float.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "encode_fast_check.h"

namespace minifloat {
namespace {

template <class F>
std::uint64_t count_different() {
  std::atomic<std::uint64_t> different = 0;
  const std::uint64_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < cores; ++t)
    threads.emplace_back([&different, t, cores] {
      std::uint64_t mine = 0;
      for (std::uint64_t bits = (t << 32) / cores; bits < ((t + 1) << 32) / cores; ++bits)
        mine += encodes_alike<F>(static_cast<std::uint32_t>(bits)) ? 0 : 1;
      different += mine;
    });
  for (std::thread& thread : threads) thread.join();
  return different;
}

TEST(ExhaustiveEncodeFast, E4M3) { EXPECT_EQ(count_different<E4M3>(), 0u); }
TEST(ExhaustiveEncodeFast, E5M2) { EXPECT_EQ(count_different<E5M2>(), 0u); }
TEST(ExhaustiveEncodeFast, E2M1) { EXPECT_EQ(count_different<E2M1>(), 0u); }
TEST(ExhaustiveEncodeFast, E1M2) { EXPECT_EQ(count_different<E1M2>(), 0u); }

}  // namespace
}  // namespace minifloat
