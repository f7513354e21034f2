// SwiGLU and its gradient: a warp takes a row, and a lane 8 columns at a time.
//
//     columns        0..7    8..15  …  248..255    256..263  …
//     lane           0       1         31          0
//
// so that the sum of a row, for the weight's gradient, has the order of core/swiglu.h. Of a fused
// product whose columns alternate, a lane takes 16 elements.
//
//     bytes an element of h: forward 2 + 2 of gate and up, 2 of h; backward 6 and 4 (bf16)
#include "cuda/activation/swiglu.cuh"

#include "cuda/activation/activation.h"
#include "cuda/backend.h"
#include "cuda/common/launch.h"

namespace minifloat::cuda {
namespace {

struct ForwardArgs {
  SwiGluArgs of;
  void* h;
};
struct BackwardArgs {
  SwiGluArgs of;
  const void* dh;
  std::int64_t dh_stride;
  void *gate, *up;  // gradients, rows `stride` elements apart
  std::int64_t stride;
  float* weights;
};

// Gate and up of 8 columns.
template <class T, bool kInterleaved>
struct GateAndUp {
  Vec8<T, 2> both;  // interleaved, or gate before up

  static __device__ __forceinline__ constexpr int at(int i, bool is_up) {
    return kInterleaved ? 2 * i + is_up : i + kSwiGluVec * is_up;
  }
  __device__ __forceinline__ float gate(int i) const { return both[at(i, false)]; }
  __device__ __forceinline__ float up(int i) const { return both[at(i, true)]; }

  __device__ __forceinline__ void set_up_to_ones() {
    constexpr std::uint32_t kOnes = sizeof(T) == 4 ? 0x3F80'0000u : 0x3F80'3F80u;
#pragma unroll
    for (int i = 0; i < Vec8<T>::kWords; ++i) both.w[Vec8<T>::kWords + i] = kOnes;
  }
  __device__ __forceinline__ static Vec8<T>& half(Vec8<T, 2>& of, int i) {
    return *reinterpret_cast<Vec8<T>*>(of.w + i * Vec8<T>::kWords);
  }
  __device__ __forceinline__ static void load(Vec8<T>& to, const T* from, int count,
                                              bool is_aligned) {
    is_aligned&& count == kSwiGluVec ? to.load(from) : to.load_some(from, count);
  }
  // gate, up: the first column's elements; up null: ones; count: columns, at most 8
  __device__ __forceinline__ void load(const T* gate, const T* up, int count, bool is_aligned) {
    if constexpr (kInterleaved) {
      is_aligned&& count == kSwiGluVec ? both.load(gate) : both.load_some(gate, 2 * count);
    } else {
      load(half(both, 0), gate, count, is_aligned);
      if (!up) return set_up_to_ones();
      load(half(both, 1), up, count, is_aligned);
    }
  }
  __device__ __forceinline__ void set_pair(int i, float gate, float up, float next_gate,
                                           float next_up) {
    if constexpr (kInterleaved)
      both.set_pair(2 * i, gate, up), both.set_pair(2 * i + 2, next_gate, next_up);
    else
      both.set_pair(i, gate, next_gate), both.set_pair(i + kSwiGluVec, up, next_up);
  }
  __device__ __forceinline__ static void store(const Vec8<T>& from, T* to, int count,
                                               bool is_aligned) {
    is_aligned&& count == kSwiGluVec ? from.store(to) : from.store_some(to, count);
  }
  // up: null: not stored
  __device__ __forceinline__ void store(T* gate, T* up, int count, bool is_aligned) {
    both.canonicalize_nans();
    if constexpr (kInterleaved) {
      is_aligned&& count == kSwiGluVec ? both.store(gate) : both.store_some(gate, 2 * count);
    } else {
      store(half(both, 0), gate, count, is_aligned);
      if (up) store(half(both, 1), up, count, is_aligned);
    }
  }
};

// The row of a warp, and its weight.
template <class T, int kStep>
struct WarpRow {
  std::int64_t row;
  const T *gate, *up;
  bool is_inside;       // before the last group's end
  std::uint32_t place;  // of the weight
  float weight;

  __device__ __forceinline__ explicit WarpRow(const SwiGluArgs& of)
      : row(static_cast<std::int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32) {
    if (row >= of.rows) return;
    gate = static_cast<const T*>(of.gate) + row * of.gate_stride;
    up = of.up ? static_cast<const T*>(of.up) + row * of.up_stride : nullptr;
    is_inside = !of.last_end || row < __ldg(of.last_end);
    place = of.place_of(row);
    weight = of.weight_at(place);
  }
  __device__ __forceinline__ const T* up_at(int col) const { return up ? up + col * kStep : up; }
  __device__ __forceinline__ bool has_place(const SwiGluArgs& of) const { return place < of.rows; }
  __device__ __forceinline__ static std::uint32_t first_col() {
    return threadIdx.x % 32 * kSwiGluVec;
  }
};

template <class T, bool kInterleaved, bool kHasLimit, Activation kActivation>
__global__ void __launch_bounds__(kRowThreads)
    swiglu_rows(const __grid_constant__ ForwardArgs args) {
  constexpr int kStep = kInterleaved ? 2 : 1, kTogether = 2;
  const SwiGluArgs& of = args.of;
  const WarpRow<T, kStep> at(of);
  if (at.row >= of.rows) return;
  T* const h = static_cast<T*>(args.h) + at.row * of.width;
  for (int first = at.first_col(); first < of.width; first += kTogether * kSwiGluPartials) {
    GateAndUp<T, kInterleaved> in[kTogether];
    int count[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int col = first + i * kSwiGluPartials;
      count[i] = min(of.width - col, kSwiGluVec);
      if (at.is_inside && count[i] > 0)
        in[i].load(at.gate + col * kStep, at.up_at(col), count[i], of.is_aligned);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int col = first + i * kSwiGluPartials;
      if (count[i] <= 0) break;
      Vec8<T> out = {};
      if (at.is_inside) {
        float v[kSwiGluVec];
#pragma unroll
        for (int j = 0; j < kSwiGluVec; ++j)
          v[j] = minifloat::swiglu<kHasLimit, kActivation>(in[i].gate(j), in[i].up(j), at.weight,
                                                           of.form, FastReciprocal{});
#pragma unroll
        for (int j = 0; j < kSwiGluVec; j += 2) out.set_pair(j, v[j], v[j + 1]);
        out.canonicalize_nans();
      }
      if (of.is_aligned && count[i] == kSwiGluVec)
        out.store(h + col);
      else
        out.store_some(h + col, count[i]);
    }
  }
}

template <class T, bool kInterleaved, bool kHasLimit, Activation kActivation>
__global__ void __launch_bounds__(kRowThreads, 4)
    swiglu_backward_rows(const __grid_constant__ BackwardArgs args) {
  constexpr int kStep = kInterleaved ? 2 : 1;
  const SwiGluArgs& of = args.of;
  const WarpRow<T, kStep> at(of);
  if (at.row >= of.rows) return;
  const T* const dh = static_cast<const T*>(args.dh) + at.row * args.dh_stride;
  T* const d_gate = static_cast<T*>(args.gate) + at.row * args.stride;
  T* const d_up = args.up ? static_cast<T*>(args.up) + at.row * args.stride : nullptr;
  float partial[kSwiGluVec] = {};
  for (int col = at.first_col(); col < of.width; col += kSwiGluPartials) {
    const int count = min(of.width - col, kSwiGluVec);
    GateAndUp<T, kInterleaved> both = {};
    if (at.is_inside) {
      Vec8<T> g;
      both.load(at.gate + col * kStep, at.up_at(col), count, of.is_aligned);
      if (of.is_aligned && count == kSwiGluVec)
        g.load(dh + col);
      else
        g.load_some(dh + col, count);
      GateAndUp<T, kInterleaved> out;
#pragma unroll
      for (int j = 0; j < kSwiGluVec; j += 2) {
        SwiGluGradient d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          d[i] = swiglu_gradient<kHasLimit, kActivation>(g[j + i], both.gate(j + i), both.up(j + i),
                                                         at.weight, of.form, FastReciprocal{});
          partial[j + i] += d[i].weight;  // zero past the last column
        }
        out.set_pair(j, d[0].gate, d[0].up, d[1].gate, d[1].up);
      }
      both = out;
    }
    both.store(d_gate + col * kStep, d_up ? d_up + col * kStep : d_up, count, of.is_aligned);
  }
  if (!args.weights) return;
  const float sum = sum_of_partials(partial);
  if (threadIdx.x % 32 == 0 && at.has_place(of)) args.weights[at.place] = canonicalize_nan(sum);
}

// Calls launch<T, interleaved, has_limit, activation>() as the arguments have it.
template <class Launch>
void with_form(const SwiGlu& of, Launch launch) {
  constexpr auto kSilu = Activation::kSilu;
  const auto of_dtype = [&]<class T>() {
    if (of.activation == Activation::kGelu)
      launch.template operator()<T, false, false, Activation::kGelu>();
    else if (of.activation == Activation::kGeluTanh)
      launch.template operator()<T, false, false, Activation::kGeluTanh>();
    else if (of.is_interleaved)
      of.has_limit ? launch.template operator()<T, true, true, kSilu>()
                   : launch.template operator()<T, true, false, kSilu>();
    else
      of.has_limit ? launch.template operator()<T, false, true, kSilu>()
                   : launch.template operator()<T, false, false, kSilu>();
  };
  of.dtype == DType::kFloat32 ? of_dtype.template operator()<float>()
                              : of_dtype.template operator()<Bf16>();
}

unsigned rows_grid(std::int64_t rows, const char* kernel) {
  return grid_of(ceil_div<std::int64_t>(rows, kRowWarps), kernel);
}

// Writes the gradients, without their amaxes.
void write_gradients(const SwiGlu& of, const SwiGluGradients& d, const Execution& execution) {
  if (of.rows == 0) return;
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  BackwardArgs args = {args_of(of), d.dh, d.dh_stride, d.gate, d.up, d.stride, d.weights};
  args.of.is_aligned =
      args.of.is_aligned && has_aligned_rows(d.dh, d.dh_stride * size, of.rows) &&
      has_aligned_rows(d.gate, d.stride * size, of.rows) &&
      (of.is_interleaved || !d.up || has_aligned_rows(d.up, d.stride * size, of.rows));
  if (of.places && d.weights)
    check(cudaMemsetAsync(d.weights, 0, static_cast<std::size_t>(of.rows) * sizeof(float),
                          cuda_stream(execution)),
          "swiglu_backward");
  with_form(of, [&]<class T, bool kInterleaved, bool kHasLimit, Activation kActivation>() {
    swiglu_backward_rows<T, kInterleaved, kHasLimit, kActivation>
        <<<rows_grid(of.rows, "swiglu_backward"), kRowThreads, 0, cuda_stream(execution)>>>(args);
  });
  check_launch("swiglu_backward");
}

}  // namespace

void swiglu(const SwiGlu& of, void* h, const Execution& execution) {
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  ForwardArgs args = {args_of(of), h};
  args.of.is_aligned = args.of.is_aligned && has_aligned_rows(h, of.width * size, of.rows);
  with_form(of, [&]<class T, bool kInterleaved, bool kHasLimit, Activation kActivation>() {
    swiglu_rows<T, kInterleaved, kHasLimit, kActivation>
        <<<rows_grid(of.rows, "swiglu"), kRowThreads, 0, cuda_stream(execution)>>>(args);
  });
  check_launch("swiglu");
}

void swiglu_backward(const SwiGlu& of, const SwiGluGradients& d, const Execution& execution) {
  if (d.of_gate && swiglu_backward_of_groups(of, d, execution)) return;
  write_gradients(of, d, execution);
  for (const bool is_of_up : {false, true})
    if (const LineAmaxes& to = is_of_up ? d.of_up : d.of_gate; to)
      amax_of_rows_and_columns(d.matrix(of, is_of_up), to.rows, to.columns, execution);
}

void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  if (quantize_swiglu_in_one(of, rowwise, columnwise, execution)) return;
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  const Scratch h(static_cast<std::size_t>(of.rows * of.width * size), execution);
  cuda::swiglu(of, h.as<void>(), execution);
  cuda::quantize(of.h_at(h.as<void>()), rowwise, columnwise, execution);
}

}  // namespace minifloat::cuda
