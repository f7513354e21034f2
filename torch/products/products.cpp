// The ops scaled_mm and add_scaled_mm, the product of two quantized operands, a · bᵀ: their checks,
// and the call of the engine (engines.h).
#include "products/products.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "minifloat/group_checks.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"
#include "ops/outputs.h"
#include "products/grouped.h"

namespace minifloat {
namespace torch_ops {
namespace {

using c10::SymInt;

// Whether an operand's elements are contiguous and begin at a multiple of 16 bytes.
bool is_aligned(const ProductInput& input) {
  const Tensor& t = *tensors_of(input).elements;
  return t.is_contiguous() && reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool has_codes(const ProductInput& input) {
  return (std::holds_alternative<Codes>(input) || std::holds_alternative<SwizzledCodes>(input) ||
          std::holds_alternative<Fp4AsFp8>(input)) &&
         is_aligned(input);
}

// Whether the engines of exact products read an operand as aligned rows of bf16 values. Decoding
// writes such rows.
bool has_bf16_rows(const ProductInput& input) {
  const Values* const values = std::get_if<Values>(&input);
  if (values && values->values.scalar_type() != at::kBFloat16) return false;
  const bool is_decoded = std::holds_alternative<Decoded>(input);
  return !(values || is_decoded) || is_aligned(input);
}

GroupsAlong along_of(const Groups& groups) {
  if (!groups.table) return GroupsAlong::kNone;
  return groups.unit > 0 ? GroupsAlong::kContraction : GroupsAlong::kRows;
}

// Checks a table on the CPU: its boundaries among rows, and under the unit where there is one.
void check_table(const Groups& groups, const Tensor& a, std::int64_t k, std::int64_t length) {
  const int unit = static_cast<int>(groups.unit);
  const GroupTable table = group_table_of("scaled_mm", groups, unit);
  const Device device = bridge::backend_of(a);
  bridge::with_value_errors([&] {
    check_group_table("scaled_mm", table, device, 0, unit > 0 ? k : a.size(0));
    if (unit > 0) check_group_table("scaled_mm", table, device, unit, length);
  });
}

// Sets the rows past the last group to zero.   out: (M, n), contiguous
void clear_tail(const Tensor& out, const Groups& groups) {
  const GroupTable table = group_table_of("scaled_mm", groups, 0);
  const std::int64_t row_bytes = out.size(1) * static_cast<std::int64_t>(out.element_size());
  bridge::with_value_errors([&] {
    clear_past_groups(table, out.mutable_data_ptr(), row_bytes, out.size(0),
                      bridge::backend_of(out), bridge::ExecutionOn(out));
  });
}

// Returns the shape of the product.
c10::SymDimVector result_shape(const Tensor& a, const Tensor& b, const Groups& groups) {
  const SymInt m = a.sym_size(0), n = b.sym_size(-2);
  if (along_of(groups) == GroupsAlong::kContraction) return {groups.count(), m, n};
  return {m, n};
}

// Whether no element of a product with groups belongs to one. No engine is called for it: those of
// GPUs expect a group and a row.
bool is_of_no_group(const ProductShape& shape, const Groups& groups) {
  return shape.along != GroupsAlong::kNone &&
         (groups.table->size(1) == 1 || shape.m == 0 || shape.n == 0);
}

Tensor multiply(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                std::int64_t k, const Result& result, const Groups& groups, bool zeroes_tail) {
  const auto is_fp8 = [](const ProductInput& x) { return std::holds_alternative<Fp4AsFp8>(x); };
  const std::int64_t length = length_of(k, groups).guard_int(__FILE__, __LINE__);
  const ProductShape shape = {.m = tensors_of(a).elements->size(0),
                              .n = tensors_of(b).elements->size(-2),
                              .k = planned.product.a.padded_cols(length),
                              .out_dtype = result.dtype,
                              .has_bias = result.bias.has_value(),
                              .has_codes = has_codes(a) && has_codes(b),
                              .has_bf16_rows = has_bf16_rows(a) && has_bf16_rows(b),
                              .has_fp4_as_fp8 = is_fp8(a) || is_fp8(b),
                              .along = along_of(groups)};
  const Tensor &left = *tensors_of(a).elements, &right = *tensors_of(b).elements;
  check_table(groups, left, k, length);
  if (shape.along != GroupsAlong::kNone && !planned.product.is_bf16())
    warn_without_kernels(planned.capability);
  if (result.sum)
    return planned.engine_for(shape).multiply({planned.product, a, b, length, result, groups});
  // Rows of torch's grouped products are padded to multiples of 16 bytes.
  const Tensor out =
      is_of_no_group(shape, groups)
          ? at::empty_symint(result_shape(left, right, groups), left.options().dtype(result.dtype))
          : planned.engine_for(shape)
                .multiply({planned.product, a, b, length, result, groups})
                .contiguous();
  if (zeroes_tail && shape.along == GroupsAlong::kRows) clear_tail(out, groups);
  return out;
}

// Adds the product to `sum`, of any strides, and counts the write.
void multiply_add(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                  std::int64_t k, const Tensor& sum) {
  // Backward within autocast's context would round the product on the CPU.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const std::optional<Tensor> no_bias;
  const Tensor* const in_place = sum.is_contiguous() ? &sum : nullptr;
  const Tensor product = multiply(planned, a, b, k, {no_bias, at::kFloat, in_place}, {}, false);
  if (!product.is_same(sum)) sum.add_(product);
  if (!sum.is_inference()) sum.unsafeGetTensorImpl()->bump_version();
}

// Returns what an operand is measured by.   is_matrices: it is b, one matrix a group
InputSizes sizes_of(const SymInt& k, const Groups& groups, bool is_matrices) {
  const GroupsAlong along = along_of(groups);
  InputSizes sizes{.k = length_of(k, groups), .values_k = k, .matrices = {}, .groups = {}};
  if (along == GroupsAlong::kRows && is_matrices) sizes.matrices = groups.count();
  if (along == GroupsAlong::kContraction || (along == GroupsAlong::kRows && !is_matrices))
    sizes.groups = groups.count();
  sizes.is_along_contraction = along == GroupsAlong::kContraction;
  return sizes;
}

void check_product(const Product& product, const ProductInput& a, const ProductInput& b,
                   const SymInt& k, const Result& result, const Groups& groups) {
  constexpr const char* kOp = "scaled_mm";
  check_operands(kOp, product, a, b, k, groups);
  TORCH_CHECK_VALUE(bridge::is_value_dtype(result.dtype),
                    "scaled_mm: expected out_dtype float32 or bfloat16, got ", result.dtype);
  if (!result.bias) return;
  bridge::check_value_dtype(kOp, "bias", *result.bias);
  TORCH_CHECK_VALUE(along_of(groups) != GroupsAlong::kContraction,
                    "scaled_mm: expected no bias with groups along the contraction dimension");
  const auto sizes = tensors_of(b).elements->sym_sizes();
  const auto expected = sizes.slice(0, sizes.size() - 1);
  TORCH_CHECK_VALUE(result.bias->sym_sizes().equals(expected), "scaled_mm: expected bias ",
                    expected, ", got ", result.bias->sym_sizes());
}

// Calls f(name, tensor) for each tensor of a product. name: for errors.
template <class F>
void each_tensor(const InputTensors& a, const InputTensors& b, const std::optional<Tensor>& bias,
                 F f) {
  const auto call = [&](const char* name, const Tensor* t) {
    if (t) f(name, *t);
  };
  call("a", a.elements), call("the scale of a", a.scale), call("the amax of a", a.amax);
  call("b", b.elements), call("the scale of b", b.scale), call("the amax of b", b.amax);
  if (bias) f("bias", *bias);
}

void check_devices(const InputTensors& a, const InputTensors& b,
                   const std::optional<Tensor>& bias) {
  each_tensor(a, b, bias, [&](const char* name, const Tensor& t) {
    bridge::check_same_device("scaled_mm", name, t, *a.elements);
  });
}

void check_memory(const InputTensors& a, const InputTensors& b, const std::optional<Tensor>& bias) {
  each_tensor(a, b, bias, [](const char* name, const Tensor& t) {
    bridge::check_memory("scaled_mm", name, t);
  });
}

Tensor scaled_mm_kernel(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax,
                        const Tensor& b, const Tensor& b_scale, const Tensor& b_amax,
                        const std::string& text, SymInt k, const std::optional<Tensor>& bias,
                        at::ScalarType out_dtype, const std::optional<Tensor>& table,
                        std::int64_t unit, bool zeroes_tail) {
  const Groups groups = {table, unit};
  const Product& product = bridge::parse_product(text);
  const ProductInput left = input_of(product.a, a, a_scale, a_amax),
                     right = input_of(product.b, b, b_scale, b_amax);
  const InputTensors of_a = {&a, &a_scale, &a_amax}, of_b = {&b, &b_scale, &b_amax};
  check_product(product, left, right, k, {bias, out_dtype}, groups);
  check_devices(of_a, of_b, bias);
  if (a.is_meta())
    return at::empty_symint(result_shape(a, b, groups), a.options().dtype(out_dtype));
  check_memory(of_a, of_b, bias);
  const PlannedProduct planned = plan_product(product, text, a.device(), table.has_value());
  const at::AutoDispatchBelowADInplaceOrView below;  // layers/linear.cpp differentiates
  return multiply(planned, left, right, k.guard_int(__FILE__, __LINE__), {bias, out_dtype}, groups,
                  zeroes_tail);
}

constexpr const char* kAdd = "add_scaled_mm";

// Requires fp32 sums of the product's shape, with memory for each.
void check_sum(const Tensor& sum, const InputTensors& a, const InputTensors& b) {
  const c10::SymDimVector expected = {a.elements->sym_size(0), b.elements->sym_size(0)};
  TORCH_CHECK_VALUE(sum.scalar_type() == at::kFloat && sum.sym_sizes().equals(expected), kAdd,
                    ": expected sum as float32 ", c10::SymIntArrayRef(expected), ", got ",
                    sum.scalar_type(), " ", sum.sym_sizes());
  TORCH_CHECK_VALUE(at::has_internal_overlap(sum) != at::MemOverlap::Yes, kAdd,
                    ": expected sum with memory for each element, got strides ", sum.sym_strides());
  bridge::check_same_device(kAdd, "sum", sum, *a.elements);
}

void check_sum_of_product(const Product& product, const ProductInput& a, const ProductInput& b,
                          const SymInt& k, const Tensor& sum) {
  check_operands(kAdd, product, a, b, k, {});
  check_devices(tensors_of(a), tensors_of(b), std::nullopt);
  check_sum(sum, tensors_of(a), tensors_of(b));
}

void add_scaled_mm_kernel(const Tensor& sum, const Tensor& a, const Tensor& a_scale,
                          const Tensor& a_amax, const Tensor& b, const Tensor& b_scale,
                          const Tensor& b_amax, const std::string& text, SymInt k) {
  const Product& product = bridge::parse_product(text);
  const ProductInput left = input_of(product.a, a, a_scale, a_amax),
                     right = input_of(product.b, b, b_scale, b_amax);
  check_sum_of_product(product, left, right, k, sum);
  if (sum.is_meta()) return;
  check_memory({&a, &a_scale, &a_amax}, {&b, &b_scale, &b_amax}, std::nullopt);
  bridge::check_memory(kAdd, "sum", sum);
  const PlannedProduct planned = plan_product(product, text, a.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  multiply_add(planned, left, right, k.guard_int(__FILE__, __LINE__), sum);
}

// Neither op has a derivative of its own: a backward pass or a tangent through it raises.
// layers/linear.cpp has the derivatives of layers.
const Op scaled_mm_op("scaled_mm", scaled_mm_kernel, refused());
const Op add_scaled_mm_op(kAdd, add_scaled_mm_kernel, refused());

}  // namespace

SymInt length_of(const SymInt& k, const Groups& groups) {
  return along_of(groups) == GroupsAlong::kContraction
             ? grouped_cols<SymInt>(k, SymInt(groups.unit), groups.count())
             : k;
}

void check_operands(const char* op, const Product& product, const ProductInput& a,
                    const ProductInput& b, const SymInt& k, const Groups& groups) {
  bridge::check_size(op, "k", k);
  check_groups(op, groups, *tensors_of(a).elements);
  for (const Spec* spec : {&product.a, &product.b})
    TORCH_CHECK_VALUE(groups.unit % spec->group_unit() == 0, op,
                      ": expected group_unit as a multiple of ", spec->group_unit(), " under ",
                      spec->str(), ", got ", groups.unit);
  check_input("a", product.a, a, sizes_of(k, groups, false));
  check_input("b", product.b, b, sizes_of(k, groups, true));
}

Tensor scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                 const SymInt& k, const std::optional<Tensor>& bias, at::ScalarType out_dtype,
                 const Groups& groups, bool zeroes_tail) {
  const InputTensors left = tensors_of(a), right = tensors_of(b);
  const auto length = k.maybe_as_int();
  if (length && can_skip_dispatcher({left.elements, left.scale, left.amax, right.elements,
                                     right.scale, right.amax, bias ? &*bias : nullptr,
                                     groups.table ? &*groups.table : nullptr})) {
    check_product(planned.product, a, b, k, {bias, out_dtype}, groups);
    check_devices(left, right, bias);
    check_memory(left, right, bias);
    const at::AutoDispatchBelowADInplaceOrView below;
    return multiply(planned, a, b, *length, {bias, out_dtype}, groups, zeroes_tail);
  }
  const Tensor &a_elements = *left.elements, &b_elements = *right.elements;
  return scaled_mm_op(a_elements, or_empty(left.scale, a_elements), or_empty(left.amax, a_elements),
                      b_elements, or_empty(right.scale, b_elements),
                      or_empty(right.amax, b_elements), planned.text, k, bias, out_dtype,
                      groups.table, groups.unit, zeroes_tail);
}

void add_scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                   const SymInt& k, const Tensor& sum) {
  const InputTensors left = tensors_of(a), right = tensors_of(b);
  const auto length = k.maybe_as_int();
  if (length && can_skip_dispatcher({left.elements, left.scale, left.amax, right.elements,
                                     right.scale, right.amax, &sum})) {
    check_sum_of_product(planned.product, a, b, k, sum);
    check_memory(left, right, std::nullopt);
    const at::AutoDispatchBelowADInplaceOrView below;
    return multiply_add(planned, a, b, *length, sum);
  }
  const Tensor &a_elements = *left.elements, &b_elements = *right.elements;
  add_scaled_mm_op(sum, a_elements, or_empty(left.scale, a_elements),
                   or_empty(left.amax, a_elements), b_elements, or_empty(right.scale, b_elements),
                   or_empty(right.amax, b_elements), planned.text, k);
}

Tensor sum_of_groups(const Tensor& x, const Tensor& table) {
  static const std::string text = "bf16*bf16";
  const PlannedProduct planned =
      plan_product(bridge::parse_product(text), text, x.device(), /*is_grouped=*/true);
  // Eight rows of ones are columns of 16 bytes, which the engine reads without a copy.
  const Tensor ones = at::ones_symint({x.sym_size(0), SymInt(8)}, x.options()).transpose(0, 1);
  return scaled_mm(planned, Values{ones}, Values{x.transpose(0, 1)}, x.sym_size(0), std::nullopt,
                   at::kFloat, {table, kSmallestUnit})
      .select(1, 0);
}

ProductInput prepare_input(const PlannedProduct& planned, const Spec& spec, ProductInput input,
                           const SymInt& cols) {
  const auto prepare = planned.engine.prepare;
  const Codes* const codes = std::get_if<Codes>(&input);
  if (prepare && codes) return prepare(spec, *codes, cols);
  return input;
}

}  // namespace torch_ops
}  // namespace minifloat
