// Work over [0, count) in parts, on the caller's threads or on one a core. Results never depend on
// the split.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "minifloat/tensor_ref.h"

namespace minifloat::cpu {

// Runs the body on new threads, one a core, where the caller passes no parallel_for.
inline void default_parallel_for(std::int64_t count,
                                 void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t parts = std::min(cores, count);
  std::vector<std::thread> threads;
  for (std::int64_t i = 1; i < parts; ++i)
    threads.emplace_back(body, context, count * i / parts, count * (i + 1) / parts);
  body(context, 0, count / std::max<std::int64_t>(parts, 1));
  for (std::thread& thread : threads) thread.join();
}

// Calls f(i) for each i of [0, count); on the calling thread alone where the work is small.
template <class F>
void parallel_for(const Execution& execution, std::int64_t count, std::int64_t elements, F f) {
  constexpr std::int64_t kSmall = 1 << 14;
  const auto body = [](void* context, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) (*static_cast<F*>(context))(i);
  };
  if (count <= 0) return;
  if (count == 1 || elements < kSmall) return body(&f, 0, count);
  (execution.parallel_for ? execution.parallel_for : default_parallel_for)(count, body, &f);
}

}  // namespace minifloat::cpu
