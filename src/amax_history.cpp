// minifloat/amax_history.h: the checks before a backend is called, and the CPU's backend itself.
#include "minifloat/amax_history.h"

#include "minifloat/core/amax_history.h"
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
  MINIFLOAT_CHECK(histories.length >= 1 && histories.count >= 0 && histories.margin >= 0,
                  "roll_amax_histories: expected histories of at least one step and a margin of at "
                  "least 0, got ",
                  histories.count, " of ", histories.length, " and ", histories.margin);
  if (histories.count == 0) return;
  MINIFLOAT_ON(histories.device, roll_amax_histories(histories, execution));
}

void raise_amaxes(std::span<const FoundAmax> found, Device device,
                  [[maybe_unused]] const Execution& execution) {
  check_device("raise_amaxes", device);
  MINIFLOAT_ON(device, raise_amaxes(found, execution));
}

}  // namespace minifloat
