// Fingerprint: a 64-bit hash of a tensor's bytes. A cache of a weight's codes compares fingerprints
// to detect writes to the weight, also writes that torch does not count (through .data, by NumPy).
// CPU memory only: one read of it costs less than a cast.
//
//     bytes -> chunks of 1 MiB -> four 64-bit lanes of (lane ^ input) * odd, rotated
//           -> one hash a chunk -> one hash
//
// One changed input of 64 bits always changes the chunk's hash, since each step is a bijection of
// its lane. Two changes cancel with a probability of about 2^-64.
#include "ops/fingerprint.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <bit>
#include <cstring>
#include <iterator>
#include <vector>

#include "ops/checks.h"

namespace minifloat {
namespace {

constexpr std::int64_t kChunk = 1 << 20;
constexpr int kLanes = 4;
constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio

std::uint64_t mix(std::uint64_t lane, std::uint64_t input) {
  return std::rotl((lane ^ input) * kOdd, 29);
}

std::uint64_t hash_of(const unsigned char* bytes, std::int64_t count) {
  std::uint64_t lanes[kLanes] = {1, 2, 3, 4};
  constexpr std::int64_t kStep = kLanes * sizeof(std::uint64_t);
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    std::uint64_t inputs[kLanes];
    std::memcpy(inputs, bytes + i, kStep);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], inputs[lane]);
  }
  std::uint64_t rest[kLanes] = {};
  std::memcpy(rest, bytes + i, static_cast<std::size_t>(count - i));
  std::uint64_t hash = static_cast<std::uint64_t>(count);
  for (int lane = 0; lane < kLanes; ++lane) hash = mix(hash, mix(lanes[lane], rest[lane]));
  return hash;
}

std::uint64_t hash_of(const at::Tensor& t) {
  const auto bytes = static_cast<const unsigned char*>(t.const_data_ptr());
  const auto count = static_cast<std::int64_t>(t.nbytes());
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>((count + kChunk - 1) / kChunk));
  at::parallel_for(0, std::ssize(hashes), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      hashes[static_cast<std::size_t>(i)] =
          hash_of(bytes + i * kChunk, std::min(kChunk, count - i * kChunk));
  });
  std::uint64_t hash = 0;
  for (const std::uint64_t h : hashes) hash = mix(hash, h);
  return hash;
}

// The hash of a tensor's bytes at one time.
class Fingerprint : public torch::CustomClassHolder {
 public:
  explicit Fingerprint(const at::Tensor& t) : hash_(torch_ops::fingerprint_of(t)) {}
  bool matches(const at::Tensor& t) const { return torch_ops::fingerprint_of(t) == hash_; }
  std::int64_t value() const { return static_cast<std::int64_t>(hash_); }

 private:
  std::uint64_t hash_;
};

}  // namespace

std::uint64_t torch_ops::fingerprint_of(const at::Tensor& t) {
  bridge::check_memory("Fingerprint", "t", t);
  TORCH_CHECK_VALUE(t.is_cpu() && t.is_contiguous(),
                    "Fingerprint: expected contiguous memory of the CPU, got strides ", t.strides(),
                    " on ", t.device());
  return hash_of(t);
}

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  m.class_<Fingerprint>("Fingerprint")
      .def(torch::init<const at::Tensor&>())
      .def("value", [](const c10::intrusive_ptr<Fingerprint>& self) { return self->value(); })
      .def("matches", [](const c10::intrusive_ptr<Fingerprint>& self, const at::Tensor& t) {
        return self->matches(t);
      });
}

}  // namespace minifloat
