// Quantization on the CPU against memcpy, 8192 x 8192 bf16, outputs allocated before.
//
// bytes_per_second counts the fewest bytes: the input once, every output once. That of memcpy
// counts both the bytes read and the bytes written, so that the two compare.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "minifloat/core/rounding.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace {

using minifloat::Operand;
using minifloat::Spec;

constexpr std::int64_t kRows = 8192, kCols = 8192;

// std::vector's memory, aligned to at least a cache line, as the framework's is.
template <class T>
struct LineAligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAligned&) const { return true; }
};
template <class T>
using Vector = std::vector<T, LineAligned<T>>;

// Returns data near a normal distribution: the sum of four uniform numbers.
const Vector<std::uint16_t>& input() {
  static const Vector<std::uint16_t> x = [] {
    Vector<std::uint16_t> values(kRows * kCols);
    std::uint64_t state = 1;
    for (std::uint16_t& v : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      float sum = -2.0f;
      for (int i = 0; i < 4; ++i)
        sum += static_cast<float>((state >> (16 * i)) & 0xFFFF) / 65536.0f;
      v = static_cast<std::uint16_t>(minifloat::encode_bf16(sum));
    }
    return values;
  }();
  return x;
}

minifloat::TensorRef input_ref() {
  minifloat::TensorRef x;
  x.data = input().data();
  x.dtype = minifloat::DType::kBFloat16;
  x.rows = kRows;
  x.cols = kCols;
  x.row_stride = kCols;
  return x;
}

// The buffers of one direction.
struct Buffers {
  Vector<std::uint8_t> codes;
  Vector<float> scale;
  float amax = 2.0f;
  Operand operand;

  Buffers(const std::string& text, bool given_amax, std::int64_t rows, std::int64_t cols,
          const std::int64_t* rng) {
    const Spec spec = Spec::parse(text);
    codes.assign(static_cast<std::size_t>(rows * spec.code_cols(cols)), 1);
    const std::int64_t scales = spec.has_blocks() ? spec.scale_rows(rows) * spec.scale_cols(cols)
                                                  : (spec.has_row_amax() ? rows : 1);
    scale.assign(static_cast<std::size_t>(scales), 1.0f);
    operand.spec = spec;
    operand.codes = codes.data();
    operand.scale = scale.data();
    if (given_amax && spec.has_tensor_amax()) operand.given_amax = &amax;
    operand.random = {rng, 2, 7};
  }
  std::int64_t bytes() const {
    const bool fp32 = operand.spec.scale_type() == minifloat::ScaleType::kFloat32;
    return static_cast<std::int64_t>(codes.size() + scale.size() * (fp32 ? 4 : 1));
  }
};

void quantize(benchmark::State& state, const std::string& row, const std::string& col,
              bool given_amax) {
  const std::int64_t rng[] = {1, 2};
  std::vector<Buffers> buffers;
  buffers.reserve(2);
  const Operand *rowwise = nullptr, *columnwise = nullptr;
  std::int64_t bytes = 2 * kRows * kCols;
  if (!row.empty()) {
    rowwise = &buffers.emplace_back(row, given_amax, kRows, kCols, rng).operand;
    bytes += buffers.back().bytes();
  }
  if (!col.empty()) {
    columnwise = &buffers.emplace_back(col, given_amax, kCols, kRows, rng).operand;
    bytes += buffers.back().bytes();
  }
  const minifloat::TensorRef x = input_ref();
  for (auto _ : state) minifloat::quantize(x, rowwise, columnwise);
  state.SetBytesProcessed(state.iterations() * bytes);
}

void copy(benchmark::State& state) {
  Vector<std::uint16_t> out(kRows * kCols);
  const std::int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  for (auto _ : state) {
    std::vector<std::thread> pool;
    for (std::int64_t t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        const std::int64_t begin = kRows * kCols * t / threads,
                           end = kRows * kCols * (t + 1) / threads;
        std::memcpy(out.data() + begin, input().data() + begin,
                    static_cast<std::size_t>(end - begin) * sizeof(std::uint16_t));
      });
    for (std::thread& thread : pool) thread.join();
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(state.iterations() * 2 * kRows * kCols * 2);
}

void amax(benchmark::State& state, const std::string& text, bool columnwise) {
  std::vector<float> out(kRows);
  const Spec spec = Spec::parse(text);
  for (auto _ : state) minifloat::amax(input_ref(), spec, columnwise, out.data());
  state.SetBytesProcessed(state.iterations() * 2 * kRows * kCols);
}

void hadamard(benchmark::State& state, int points, bool columnwise) {
  Vector<std::uint16_t> out(kRows * kCols);
  for (auto _ : state)
    minifloat::hadamard(input_ref(), points, columnwise, minifloat::kHadamardSigns, out.data());
  state.SetBytesProcessed(state.iterations() * 4 * kRows * kCols);
}

// Adds a benchmark with the name "what/spec/direction", which benchmarks/cpu_table.py reads.
void add(const std::string& name, auto function) {
  benchmark::RegisterBenchmark(name.c_str(), function)
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(0.2);
}

void add_quantize(const std::string& spec, bool given_amax) {
  const std::string what = given_amax ? "quantize, amax given|" : "quantize|";
  add(what + spec + "|row", [=](benchmark::State& s) { quantize(s, spec, "", given_amax); });
  add(what + spec + "|col", [=](benchmark::State& s) { quantize(s, "", spec, given_amax); });
  add(what + spec + "|both", [=](benchmark::State& s) { quantize(s, spec, spec, given_amax); });
}

}  // namespace

int main(int argc, char** argv) {
  input();  // made before any timing
  add("memcpy||", copy);
  for (const char* spec : {"e4m3/tensor", "nvfp4", "nvfp4/16x16", "nvfp4+up", "nvfp4+4over6",
                           "nvfp4+sr", "nvfp4+rht", "nvfp4+sr+rht"})
    add_quantize(spec, true);
  for (const char* spec : {"e4m3/tensor", "e4m3/row", "e4m3/1x128", "e4m3/128x128", "mxfp8",
                           "mxfp8/32x32", "mxfp4", "mxfp4+sr+rht", "nvfp4", "nvfp4+sr+rht"})
    add_quantize(spec, false);
  add("amax|e4m3/tensor|row", [](benchmark::State& s) { amax(s, "e4m3/tensor", false); });
  add("amax|e4m3/row|col", [](benchmark::State& s) { amax(s, "e4m3/row", true); });
  add("amax|nvfp4+rht|col", [](benchmark::State& s) { amax(s, "nvfp4+rht", true); });
  for (const int points : {16, 128}) {
    add("hadamard|" + std::to_string(points) + "|row",
        [=](benchmark::State& s) { hadamard(s, points, false); });
    add("hadamard|" + std::to_string(points) + "|col",
        [=](benchmark::State& s) { hadamard(s, points, true); });
  }
  add("memcpy (again)||", copy);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
