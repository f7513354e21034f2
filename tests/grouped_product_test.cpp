// Bad input to grouped_product: an Error states what was expected, before any memory is touched.
#include "minifloat/grouped_product.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "minifloat/error.h"

namespace minifloat {
namespace {

// An address that no test reads.
template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

GroupedProduct legal_product() {
  GroupedProduct p;
  p.a = {Elements::kE4m3, at<void>(0x1000), at<float>(0x2004), GroupScales::kRows};
  p.b = {Elements::kE4m3, at<void>(0x3010), at<float>(0x4004), GroupScales::kRows};
  p.groups = {at<std::int32_t>(0x5000), 4, 0};
  p.m = 5, p.n = 24, p.k = 48;
  p.bias = at<std::uint16_t>(0x6002);
  p.out = at<std::uint16_t>(0x7000);
  return p;
}

// Expects that one fault of a legal product is refused.
void expect_refused(const std::function<void(GroupedProduct&)>& spoil, const std::string& part) {
  GroupedProduct p = legal_product();
  spoil(p);
  std::string message;
  try {
    grouped_product(p, {});
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_NE(message.find(part), std::string::npos) << part << "; message: " << message;
}

TEST(GroupedProduct, Groups) {
  const auto refused = [](const char* part, auto spoil) { expect_refused(spoil, part); };
  refused("1 to 1023 groups, got 0", [](GroupedProduct& p) { p.groups = {}; });
  refused("1 to 1023 groups, got 0", [](GroupedProduct& p) { p.groups.count = 0; });
  refused("1 to 1023 groups, got 1024", [](GroupedProduct& p) { p.groups.count = 1024; });
  refused("at least 16, got 8", [](GroupedProduct& p) { p.groups.unit = 8; });
  refused("at least 128, got 32", [](GroupedProduct& p) {
    p.a.scales = p.b.scales = GroupScales::k1x128;
    p.groups.unit = 32;
  });
  refused("no bias with groups along the contraction",
          [](GroupedProduct& p) { p.groups.unit = 16; });
}

TEST(GroupedProduct, Lengths) {
  const auto refused = [](const char* part, auto spoil) { expect_refused(spoil, part); };
  refused("m above 0, n a multiple of 8 and k of 16, got 0, 24 and 48",
          [](GroupedProduct& p) { p.m = 0; });
  refused("got 5, 20 and 48", [](GroupedProduct& p) { p.n = 20; });
  refused("got 5, 24 and 40", [](GroupedProduct& p) { p.k = 40; });
  refused("n a multiple of 8 and k of 8, got 5, 24 and 44", [](GroupedProduct& p) {
    p.a.elements = p.b.elements = Elements::kBf16;
    p.k = 44;
  });
  refused("at most 2147483647, got 2147483648, 24 and 48",
          [](GroupedProduct& p) { p.m = std::int64_t{1} << 31; });
  refused("that a kernel multiplies", [](GroupedProduct& p) { p.b.elements = Elements::kE5m2; });
}

TEST(GroupedProduct, Addresses) {
  const auto refused = [](const char* part, auto spoil) { expect_refused(spoil, part); };
  refused("expected a at a multiple of 16 bytes, got 8 bytes past one",
          [](GroupedProduct& p) { p.a.values = at<void>(0x1008); });
  refused("expected memory for a, got null", [](GroupedProduct& p) { p.a.values = nullptr; });
  refused("expected b at a multiple of 16", [](GroupedProduct& p) { p.b.values = at<void>(0x3); });
  refused("expected memory for the scale of a, got null",
          [](GroupedProduct& p) { p.a.scale = nullptr; });
  refused("expected the scale of b at a multiple of 4 bytes, got 2 bytes past one",
          [](GroupedProduct& p) { p.b.scale = at<float>(0x4002); });
  refused("expected the groups at a multiple of 4",
          [](GroupedProduct& p) { p.groups.table = at<std::int32_t>(0x5001); });
  refused("expected out at a multiple of 16",
          [](GroupedProduct& p) { p.out = at<std::uint16_t>(0x7008); });
  refused("expected bias at a multiple of 2",
          [](GroupedProduct& p) { p.bias = at<std::uint16_t>(0x6001); });
  // The last rows of a, (5, 48), and of b, (4, 24, 48).
  refused("got a and out that overlap",
          [](GroupedProduct& p) { p.out = at<std::uint16_t>(0x10E0); });
  refused("got b and out that overlap",
          [](GroupedProduct& p) { p.out = at<std::uint16_t>(0x4200); });
}

TEST(GroupedProduct, Scales) {
  const auto refused = [](auto spoil) { expect_refused(spoil, "that a kernel multiplies"); };
  refused([](GroupedProduct& p) { p.a.scales = static_cast<GroupScales>(77); });
  refused([](GroupedProduct& p) { p.b.scales = static_cast<GroupScales>(77); });
}

TEST(GroupedProduct, NeedsKernels) {
  if (has_grouped_products()) GTEST_SKIP() << "legal arguments are multiplied";
  expect_refused([](GroupedProduct&) {}, "expected a build with CUTLASS's headers, got none");
}

}  // namespace
}  // namespace minifloat
