// Work over [0, count) in parts, on the caller's threads or on one a core. Results never depend on
// the split.
//
// What a body throws, such as std::bad_alloc, reaches the function's caller: a body catches it on
// the thread it runs on, and parallel_for throws the first after all threads have ended.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "minifloat/tensor_ref.h"

namespace minifloat::cpu {

// Calls the body, which throws nothing, for parts [1, parts) on new threads and for part 0 on this
// one, which also takes the parts that the system has no thread for.
//   Thread: std::thread, or a test's
template <class Thread = std::thread>
void run_parts(std::int64_t parts, std::int64_t count,
               void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  const auto run = [=](std::int64_t i) {
    body(context, count * i / parts, count * (i + 1) / parts);
  };
  std::vector<Thread> threads;
  std::int64_t next = 1;  // the first part without a thread
  try {
    threads.reserve(static_cast<std::size_t>(parts - 1));
    for (; next < parts; ++next) threads.emplace_back(run, next);
  } catch (...) {
  }
  run(0);
  for (; next < parts; ++next) run(next);
  for (Thread& thread : threads) thread.join();
}

// Runs the body on new threads, one a core, where the caller passes no parallel_for.
inline void default_parallel_for(std::int64_t count,
                                 void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  run_parts(std::min(cores, count), count, body, context);
}

// The first exception of several threads.
class FirstException {
 public:
  // Keeps the exception that is being handled.
  void keep_current() {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::current_exception();
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

// Calls f(i) for each i of [0, count); on the calling thread alone where the work is small.
template <class F>
void parallel_for(const Execution& execution, std::int64_t count, std::int64_t elements, F f) {
  constexpr std::int64_t kSmall = 1 << 14;
  if (count <= 0) return;
  if (count == 1 || elements < kSmall) {
    for (std::int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  struct Work {
    F& f;
    FirstException exception = {};
  } work = {f};
  const auto body = [](void* context, std::int64_t begin, std::int64_t end) {
    Work& all = *static_cast<Work*>(context);
    try {
      for (std::int64_t i = begin; i < end; ++i) all.f(i);
    } catch (...) {
      all.exception.keep_current();
    }
  };
  (execution.parallel_for ? execution.parallel_for : default_parallel_for)(count, body, &work);
  work.exception.rethrow();
}

}  // namespace minifloat::cpu
