// The step from a spec's elements, known at run time, to the type of their format.
#pragma once

#include "minifloat/core/format.h"
#include "minifloat/spec.h"

namespace minifloat {

// Calls run(E4M3{}), run(E5M2{}), run(E2M1{}) or run(E1M2{}); of bf16, which has no codes, nothing.
template <class Run>
void with_format(Elements elements, const Run& run) {
  switch (elements) {
    case Elements::kE4m3: return run(E4M3{});
    case Elements::kE5m2: return run(E5M2{});
    case Elements::kE2m1: return run(E2M1{});
    case Elements::kE1m2: return run(E1M2{});
    case Elements::kBf16: return;
  }
}

}  // namespace minifloat
