#include "cuda/products/grouped.h"

#include <array>
#include <atomic>

#include "cuda/common/launch.h"

namespace minifloat::cuda {

DeviceSms current_device_sms() {
  constexpr const char* kName = "grouped_product";
  static std::array<std::atomic<int>, 64> known = {};
  DeviceSms of = {};
  check(cudaGetDevice(&of.device), kName);
  const auto index = static_cast<std::size_t>(of.device);
  if (index < known.size()) of.sms = known[index];
  if (of.sms > 0) return of;
  check(cudaDeviceGetAttribute(&of.sms, cudaDevAttrMultiProcessorCount, of.device), kName);
  if (index < known.size()) known[index] = of.sms;
  return of;
}

void grouped_product(const GroupedProduct& product, const Execution& execution) {
  if (product.a.elements == Elements::kBf16) return grouped_bf16_product(product, execution);
  if (product.a.elements == Elements::kE5m2) return grouped_e5m2_product(product, execution);
  if (product.a.scales != GroupScales::k1x128) return grouped_e4m3_product(product, execution);
  return product.groups.unit == 0 ? grouped_blocks_by_rows(product, execution)
                                  : grouped_blocks_by_columns(product, execution);
}

}  // namespace minifloat::cuda
