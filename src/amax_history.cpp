// minifloat/amax_history.h: the checks before a backend is called, and the CPU's backend itself.
#include "minifloat/amax_history.h"

#include "memory_checks.h"
#include "minifloat/core/amax_history.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "on_device.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/state/state.h"
#endif

namespace minifloat {
namespace cpu {
namespace {

void roll_amax_histories(const AmaxHistories& h, const Execution&) {
  for (std::int64_t i = 0; i < h.count; ++i)
    roll_amax_history(h.rows + i * (1 + h.length), h.length, h.algorithm, h.margin);
}

void raise_amaxes(std::span<const FoundAmax> found, const Execution&) {
  for (const FoundAmax& f : found) *f.entry = larger_amax(*f.entry, *f.amax);
}

}  // namespace
}  // namespace cpu

void roll_amax_histories(const AmaxHistories& histories, const Execution& execution) {
  check_device("roll_amax_histories", histories.device);
  MINIFLOAT_CHECK(
      histories.algorithm == DelayedAmax::kMax || histories.algorithm == DelayedAmax::kMostRecent,
      "roll_amax_histories: expected an algorithm of delayed scaling, got ",
      static_cast<int>(histories.algorithm));
  MINIFLOAT_CHECK(histories.length >= 1 && histories.count >= 0 && histories.margin >= 0,
                  "roll_amax_histories: expected histories of at least one step and a margin of at "
                  "least 0, got ",
                  histories.count, " of ", histories.length, " and ", histories.margin);
  const std::int64_t width = std::int64_t{1} + histories.length;
  MINIFLOAT_CHECK(is_addressable({histories.count, width}),
                  "roll_amax_histories: expected at most 2^48 entries, got ", histories.count,
                  " histories of ", width);
  if (histories.count == 0) return;
  Memory("roll_amax_histories").writes("histories", histories.rows, histories.count * width * 4, 4);
  MINIFLOAT_ON(histories.device, roll_amax_histories(histories, execution));
}

void raise_amaxes(std::span<const FoundAmax> found, Device device,
                  [[maybe_unused]] const Execution& execution) {
  check_device("raise_amaxes", device);
  for (const FoundAmax& f : found)
    for (const float* const at : {static_cast<const float*>(f.entry), f.amax})
      MINIFLOAT_CHECK(at && reinterpret_cast<std::uintptr_t>(at) % 4 == 0,
                      "raise_amaxes: expected an entry and an amax at multiples of 4 bytes, got ",
                      at ? "another address" : "null");
  MINIFLOAT_ON(device, raise_amaxes(found, execution));
}

}  // namespace minifloat
