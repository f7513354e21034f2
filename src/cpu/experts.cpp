// SwiGLU and the copies between tokens and rows, a row at a time in runs of 256 columns. These
// loops are the specification of the other backends.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "backends.h"
#include "gradients_in_steps.h"
#include "parallel.h"
#include "swiglu_row.h"

namespace minifloat::cpu {
namespace {

struct Backend {
  static constexpr auto quantize_swiglu = cpu::quantize_swiglu;
  static constexpr auto swiglu_backward = cpu::swiglu_backward;
  static constexpr auto amax = cpu::amax;
};

std::int64_t end_of(const SwiGlu& of) {
  return of.groups ? of.groups.of_rows()[of.groups.count] : of.rows;
}

template <class T>
SwiGluRow<T> row_of(const SwiGlu& of, std::int64_t r) {
  const std::int64_t place = of.places ? of.places[r] : r;
  return {.gate = static_cast<const T*>(of.gate) + r * of.gate_stride,
          .up = of.up ? static_cast<const T*>(of.up) + r * of.up_stride : nullptr,
          .dh = nullptr,
          .width = of.width,
          .weight = of.weights ? of.weights[place] : 1.0f,
          .form = {of.limit, of.alpha},
          .h = nullptr,
          .d_gate = nullptr,
          .d_up = nullptr};
}

template <template <class, bool, int, Activation> class Kernel, class T>
auto run_row(const SwiGlu& of, const SwiGluRow<T>& row) {
  constexpr auto kSilu = Activation::kSilu;
  switch (of.activation) {
    case Activation::kGelu: return run_widest<Kernel<T, false, 1, Activation::kGelu>>(row);
    case Activation::kGeluTanh: return run_widest<Kernel<T, false, 1, Activation::kGeluTanh>>(row);
    case kSilu: break;
  }
  if (of.is_interleaved)
    return of.has_limit ? run_widest<Kernel<T, true, 2, kSilu>>(row)
                        : run_widest<Kernel<T, false, 2, kSilu>>(row);
  return of.has_limit ? run_widest<Kernel<T, true, 1, kSilu>>(row)
                      : run_widest<Kernel<T, false, 1, kSilu>>(row);
}

template <class T>
void forward(const SwiGlu& of, T* h, const Execution& execution) {
  const std::int64_t end = end_of(of);
  parallel_for(execution, of.rows, of.rows * of.width, [&](std::int64_t r) {
    T* const to = h + r * of.width;
    if (r >= end) {
      std::fill_n(to, of.width, T{});
      return;
    }
    SwiGluRow<T> row = row_of<T>(of, r);
    row.h = to;
    run_row<SwiGluForward>(of, row);
  });
}

template <class T>
void backward(const SwiGlu& of, const SwiGluGradients& d, const Execution& execution) {
  const std::int64_t end = end_of(of), step = of.is_interleaved ? 2 : 1;
  if (of.places && d.weights) std::fill_n(d.weights, of.rows, 0.0f);
  parallel_for(execution, of.rows, of.rows * of.width, [&](std::int64_t r) {
    T* const d_gate = static_cast<T*>(d.gate) + r * d.stride;
    T* const d_up = d.up ? static_cast<T*>(d.up) + r * d.stride : nullptr;
    float unused = 0;
    float& d_weight = d.weights ? d.weights[of.places ? of.places[r] : r] : unused;
    if (r >= end) {
      for (std::int64_t i = 0; i < of.width; ++i) d_gate[i * step] = T{};
      for (std::int64_t i = 0; d_up && i < of.width; ++i) d_up[i * step] = T{};
      d_weight = 0;
      return;
    }
    SwiGluRow<T> row = row_of<T>(of, r);
    row.dh = static_cast<const T*>(d.dh) + r * d.dh_stride;
    row.d_gate = d_gate, row.d_up = d_up;
    d_weight = run_row<SwiGluBackward>(of, row);
  });
}

// One token of a sum of slots.
template <class T>
struct Token {
  const AddSlots& sum;
  const std::int32_t* places;
  const float* base;
  T* to;
};

template <class T>
struct AddToken {
  MINIFLOAT_INLINE static void run(const Token<T>& token) {
    const AddSlots& sum = token.sum;
    for (std::int64_t first = 0; first < sum.cols; first += kRunColumns) {
      const std::int64_t count = std::min(kRunColumns, sum.cols - first);
      RunValues total = {};
      if (token.base) std::copy_n(token.base + first, count, total);
      for (std::int64_t s = 0; s < sum.slots; ++s) {
        if (token.places[s] < 0) continue;
        const T* const row = static_cast<const T*>(sum.rows) + token.places[s] * sum.stride + first;
        for (std::int64_t i = 0; i < count; ++i) total[i] += load_value(row + i);
      }
      for (std::int64_t i = 0; i < count; ++i) store_value(token.to + first + i, total[i]);
    }
  }
};

template <class T>
void add_tokens(const AddSlots& sum, const Execution& execution) {
  const std::int64_t elements = sum.tokens * (sum.slots + 1) * sum.cols;
  parallel_for(execution, sum.tokens, elements, [&](std::int64_t t) {
    const Token<T> token = {.sum = sum,
                            .places = sum.places + t * sum.slots,
                            .base = sum.base ? sum.base + t * sum.cols : nullptr,
                            .to = static_cast<T*>(sum.to) + t * sum.cols};
    run_widest<AddToken<T>>(token);
  });
}

}  // namespace

void swiglu(const SwiGlu& of, void* h, const Execution& execution) {
  of.dtype == DType::kFloat32 ? forward(of, static_cast<float*>(h), execution)
                              : forward(of, static_cast<std::uint16_t*>(h), execution);
}

void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution) {
  of.dtype == DType::kFloat32 ? backward<float>(of, gradients, execution)
                              : backward<std::uint16_t>(of, gradients, execution);
  for (const bool is_of_up : {false, true}) {
    const LineAmaxes& to = is_of_up ? gradients.of_up : gradients.of_gate;
    if (!to) continue;
    const TensorRef x = gradients.matrix(of, is_of_up);
    cpu::amax(x, {kEachRow}, to.rows, execution);
    cpu::amax(x, {kEachRow, /*columnwise=*/true}, to.columns, execution);
  }
}

void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  const auto h = std::make_unique_for_overwrite<std::byte[]>(
      static_cast<std::size_t>(of.rows * of.width * size));
  cpu::swiglu(of, h.get(), execution);
  cpu::quantize(of.h_at(h.get()), rowwise, columnwise, execution);
}

void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution) {
  gradients_in_steps<Backend>(of, gradients, amaxes, count, h_col, execution);
}

void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution) {
  const auto bytes = static_cast<std::size_t>(of.rows * of.width) *
                     (of.dtype == DType::kFloat32 ? sizeof(float) : sizeof(std::uint16_t));
  const auto values = [&] { return std::make_unique_for_overwrite<std::byte[]>(bytes); };
  const auto d_gate = values(), d_up = of.up ? values() : nullptr;
  cpu::swiglu_backward(of,
                       {.dh = dh,
                        .dh_stride = dh_stride,
                        .gate = d_gate.get(),
                        .up = d_up.get(),
                        .stride = of.width,
                        .weights = nullptr},
                       execution);
  cpu::quantize(of.h_at(d_gate.get()), casts.gate_row, casts.gate_col, execution);
  if (of.up) cpu::quantize(of.h_at(d_up.get()), casts.up_row, casts.up_col, execution);
  if (casts.h_col) cpu::quantize_swiglu(of, nullptr, casts.h_col, execution);
}

void take_rows(const TakeRows& copy, const Execution& execution) {
  const auto bytes = static_cast<std::size_t>(copy.row_bytes);
  parallel_for(execution, copy.rows, copy.rows * copy.row_bytes, [&](std::int64_t r) {
    std::memcpy(static_cast<char*>(copy.to) + r * copy.row_bytes,
                static_cast<const char*>(copy.from) + copy.index[r] / copy.slots * copy.from_stride,
                bytes);
  });
}

void pack_rows(const PackRows& pack, const Execution& execution) {
  const RowLayout layout = pack.layout();
  parallel_for(execution, pack.rows, pack.rows * layout.row_bytes, [&](std::int64_t r) {
    char* const to = static_cast<char*>(pack.to) + r * layout.row_bytes;
    const std::int64_t number = pack.rows_from ? pack.rows_from[r] : r;
    std::int64_t end = 0;  // of what is written
    for (std::size_t f = 0; number >= 0 && f < pack.fields.size(); ++f) {
      const RowField& field = pack.fields[f];
      const std::int64_t row = field.slots == 0 ? number : pack.index[number] / field.slots;
      std::memset(to + end, 0, static_cast<std::size_t>(layout.begins[f] - end));
      std::memcpy(to + layout.begins[f],
                  static_cast<const char*>(field.from) + row * field.from_stride,
                  static_cast<std::size_t>(field.bytes));
      end = layout.begins[f] + field.bytes;
    }
    std::memset(to + end, 0, static_cast<std::size_t>(layout.row_bytes - end));
  });
}

void add_slots(const AddSlots& sum, const Execution& execution) {
  sum.dtype == DType::kFloat32 ? add_tokens<float>(sum, execution)
                               : add_tokens<std::uint16_t>(sum, execution);
}

}  // namespace minifloat::cpu
