// What a model keeps from step to step: amaxes raised in a history, and the random state.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "harness.h"
#include "minifloat/amax_history.h"
#include "minifloat/random_state.h"

namespace minifloat {
namespace {

TEST(State, AmaxesRaiseEntriesOneAfterTheOther) {
  std::vector<float> entries = {1.0f, 5.0f};
  const float two = 2.0f, seven = 7.0f, three = 3.0f;
  const FoundAmax found[] = {
      {&entries[0], &two}, {&entries[1], &two}, {&entries[0], &seven}, {&entries[0], &three}};
  raise_amaxes(found, Device::kCpu);
  EXPECT_EQ(entries, (std::vector<float>{7.0f, 5.0f}));
  raise_amaxes({}, Device::kCpu);
}

TEST(State, TheCountAdvancesAndWraps) {
  std::int64_t state[] = {-3, 41}, copy[2] = {};
  advance_random_state(state, copy, Device::kCpu);
  EXPECT_EQ(state[0], -3);
  EXPECT_EQ(state[1], 42);
  EXPECT_EQ(copy[0], -3);
  EXPECT_EQ(copy[1], 42);
  state[1] = std::numeric_limits<std::int64_t>::max();
  advance_random_state(state, copy, Device::kCpu);
  EXPECT_EQ(copy[1], std::numeric_limits<std::int64_t>::min());
}

TEST(State, ThreadsGetACountEach) {
  constexpr int kThreads = 4, kEach = 5000;
  std::int64_t state[] = {7, 0};
  std::vector<std::int64_t> counts(kThreads * kEach);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        std::int64_t copy[2] = {};
        advance_random_state(state, copy, Device::kCpu);
        counts[t * kEach + i] = copy[1];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(counts.begin(), counts.end());
  for (int i = 0; i < kThreads * kEach; ++i) ASSERT_EQ(counts[i], i + 1);
  EXPECT_EQ(state[1], kThreads * kEach);
}

}  // namespace
}  // namespace minifloat
