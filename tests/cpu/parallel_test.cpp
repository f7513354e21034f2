// Exceptions of a body, and threads that the system has not: neither ends the process.
#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "minifloat/error.h"

namespace minifloat::cpu {
namespace {

constexpr std::int64_t kCount = 64, kElements = 1 << 20;

// Runs 8 parts, each on a thread of its own.
void on_eight_threads(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                      void* context) {
  run_parts(8, count, body, context);
}
// Runs the parts on this thread, the last first.
void backwards(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  for (std::int64_t i = count; i > 0; --i) body(context, i - 1, i);
}

TEST(Parallel, ABodysExceptionReachesTheCallerAfterAllThreads) {
  for (const ParallelFor by :
       {ParallelFor{nullptr}, ParallelFor{on_eight_threads}, ParallelFor{backwards}})
    for (const std::int64_t bad : {std::int64_t{0}, kCount / 2, kCount - 1}) {
      std::atomic<int> done = 0, running = 0;
      std::string message;
      try {
        parallel_for({.parallel_for = by}, kCount, kElements, [&](std::int64_t i) {
          ++running;
          if (i == bad) {
            --running;
            fail("part ", i);
          }
          std::this_thread::yield();
          ++done;
          --running;
        });
      } catch (const Error& error) {
        message = error.what();
      }
      EXPECT_EQ(message, "part " + std::to_string(bad));
      EXPECT_EQ(running, 0);  // no thread is left behind
      EXPECT_LT(done, kCount);
    }
}

TEST(Parallel, OneOfSeveralExceptionsReachesTheCaller) {
  EXPECT_THROW(parallel_for({.parallel_for = on_eight_threads}, kCount, kElements,
                            [](std::int64_t i) { fail("part ", i); }),
               Error);
}

// A thread, of which the system has `left`.
struct FewThreads {
  static inline int left = 0;
  std::thread thread;

  template <class F, class Argument>
  FewThreads(F f, Argument argument) {
    if (left-- <= 0)
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    thread = std::thread(f, argument);
  }
  void join() { thread.join(); }
};

TEST(Parallel, ThisThreadTakesThePartsThatGotNone) {
  for (const int threads : {0, 1, 3, 7}) {
    FewThreads::left = threads;
    std::vector<std::atomic<int>> visits(kCount);
    run_parts<FewThreads>(
        8, kCount,
        [](void* context, std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i)
            ++(*static_cast<std::vector<std::atomic<int>>*>(context))[static_cast<std::size_t>(i)];
        },
        &visits);
    for (const std::atomic<int>& visit : visits) EXPECT_EQ(visit, 1);
  }
}

}  // namespace
}  // namespace minifloat::cpu
