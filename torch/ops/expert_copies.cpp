// The ops take_rows and add_slots, the copies between tokens and the rows of experts, which
// experts_autograd.cpp differentiates; and pack_rows, which copies rows to messages.
#include <ATen/ATen.h>

#include "minifloat/experts.h"
#include "ops/bridge.h"
#include "ops/expert_inputs.h"
#include "ops/experts.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat {

void torch_ops::check_base(const char* op, const at::Tensor& base, c10::SymIntArrayRef shape,
                           at::Device device) {
  TORCH_CHECK_VALUE(base.scalar_type() == at::kFloat && base.sym_sizes().equals(shape), op,
                    ": expected base as float32 ", shape, ", got ", base.scalar_type(), " ",
                    base.sym_sizes());
  TORCH_CHECK_VALUE(base.device() == device, op, ": expected base on ", device, ", got ",
                    base.device());
}

namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::adjacent;
using torch_ops::check_index;
using torch_ops::check_matrix;
using MaybeTensor = std::optional<Tensor>;

Tensor take_rows_kernel(const Tensor& x, const Tensor& index, SymInt slots,
                        const MaybeTensor& places) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "take_rows: expected x (rows, …), got a number");
  bridge::check_sizes("take_rows", "x", x);
  check_index("take_rows", "index", index, 1, x);
  const auto known = slots.maybe_as_int();
  TORCH_CHECK_VALUE(!known || (*known >= 1 && *known < (std::int64_t{1} << 31)),
                    "take_rows: expected 1 to 2^31 - 1 slots, got ", slots);
  if (places) {
    check_index("take_rows", "places", *places, 2, x);
    // Tokens without slots have no rows.
    TORCH_CHECK_VALUE(places->sym_size(0) == x.sym_size(0) &&
                          (places->sym_size(1) == slots || places->sym_size(1) == 0) &&
                          places->sym_numel() == index.sym_size(0),
                      "take_rows: expected places as (", x.sym_size(0), ", ", slots, ") for ",
                      index.sym_size(0), " rows, got ", places->sym_sizes());
  }
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape[0] = index.sym_size(0);
  const Tensor out = torch_ops::empty(x, shape, x.scalar_type());
  if (out.is_meta()) return out;
  bridge::check_memory("take_rows", "x", x);
  bridge::check_memory("take_rows", "index", index);
  if (places) bridge::check_memory("take_rows", "places", *places);
  bridge::check_sizes("take_rows", "the result", out);
  // A row of x is one run of memory.
  const bool is_run = x.dim() == 1 || x.size(0) == 0 || x.select(0, 0).is_contiguous();
  const Tensor from = is_run ? x : x.contiguous(), pairs = index.contiguous(),
               inverse = places ? places->contiguous() : Tensor();
  TakeRows copy;
  const auto size = static_cast<std::int64_t>(x.element_size());
  copy.from = from.const_data_ptr();
  copy.from_rows = from.size(0);
  copy.from_stride = from.stride(0) * size;
  copy.row_bytes = size;
  for (std::int64_t dim = 1; dim < x.dim(); ++dim) copy.row_bytes *= x.size(dim);
  copy.index = pairs.const_data_ptr<std::int32_t>();
  copy.rows = pairs.size(0);
  if (places) copy.places = inverse.const_data_ptr<std::int32_t>();
  copy.slots = slots.guard_int(__FILE__, __LINE__);
  copy.to = out.mutable_data_ptr();
  copy.device = bridge::backend_of(x);
  bridge::with_value_errors([&] { take_rows(copy, bridge::ExecutionOn(x)); });
  return out;
}

// ---- Messages -----------------------------------------------------------------------------------
std::vector<std::int64_t> row_layout_of(at::IntArrayRef field_bytes) {
  TORCH_CHECK_VALUE(field_bytes.size() <= kMaxRowFields, "row_layout: expected at most ",
                    kMaxRowFields, " fields, got ", field_bytes.size());
  for (const std::int64_t bytes : field_bytes) bridge::check_size("row_layout", "bytes", bytes);
  RowLayout layout(field_bytes.vec());
  layout.begins.push_back(layout.row_bytes);
  return layout.begins;
}

// Returns the fields without memory, after all checks of them.
PackRows fields_of(at::TensorList fields, const MaybeTensor& index, at::IntArrayRef slots,
                   const MaybeTensor& rows_from) {
  constexpr const char* kOp = "pack_rows";
  TORCH_CHECK_VALUE(!fields.empty() && fields.size() <= kMaxRowFields, kOp, ": expected 1 to ",
                    kMaxRowFields, " fields, got ", fields.size());
  TORCH_CHECK_VALUE(slots.empty() || slots.size() == fields.size(), kOp,
                    ": expected slots of each of ", fields.size(), " fields, got ", slots.size());
  if (index) check_index(kOp, "index", *index, 1, fields[0]);
  if (rows_from) check_index(kOp, "rows_from", *rows_from, 1, fields[0]);
  PackRows pack;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    const Tensor& t = fields[f];
    TORCH_CHECK_VALUE((t.dim() == 1 || t.dim() == 2) && t.layout() == at::kStrided, kOp,
                      ": expected dense fields of 1 or 2 dimensions, got ", t.layout(), " of ",
                      t.dim());
    bridge::check_sizes(kOp, "a field", t);
    TORCH_CHECK_VALUE(t.device() == fields[0].device(), kOp, ": expected fields on ",
                      fields[0].device(), ", got ", t.device());
    const std::int64_t columns = t.dim() == 2 ? t.sym_size(1).guard_int(__FILE__, __LINE__) : 1;
    pack.fields.push_back({.bytes = columns * static_cast<std::int64_t>(t.element_size()),
                           .slots = slots.empty() ? 0 : slots[f]});
  }
  return pack;
}

Tensor pack_rows_kernel(at::TensorList fields, const MaybeTensor& index, at::IntArrayRef slots,
                        const MaybeTensor& rows_from) {
  constexpr const char* kOp = "pack_rows";
  PackRows pack = fields_of(fields, index, slots, rows_from);
  const Tensor& numbered = rows_from ? *rows_from : index ? *index : fields[0];
  const Tensor out =
      torch_ops::empty(fields[0], {numbered.sym_size(0), pack.layout().row_bytes}, at::kByte);
  if (out.is_meta()) return out;
  bridge::check_sizes(kOp, "the result", out);
  std::vector<Tensor> adjacent_fields;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    bridge::check_memory(kOp, "a field", fields[f]);
    const Tensor& from =
        adjacent_fields.emplace_back(fields[f].dim() == 2 ? adjacent(fields[f]) : fields[f]);
    RowField& field = pack.fields[f];
    field.from = from.const_data_ptr();
    field.from_rows = from.size(0);
    field.from_stride = from.stride(0) * static_cast<std::int64_t>(from.element_size());
  }
  Tensor indices, numbers;
  if (index) {
    bridge::check_memory(kOp, "index", *index);
    indices = index->contiguous();
    pack.index = indices.const_data_ptr<std::int32_t>();
  }
  if (rows_from) {
    bridge::check_memory(kOp, "rows_from", *rows_from);
    numbers = rows_from->contiguous();
    pack.rows_from = numbers.const_data_ptr<std::int32_t>();
  }
  pack.from_rows = index ? index->size(0) : fields[0].size(0);
  pack.rows = out.size(0);
  pack.to = out.mutable_data_ptr();
  pack.device = bridge::backend_of(out);
  bridge::with_value_errors([&] { pack_rows(pack, bridge::ExecutionOn(out)); });
  return out;
}

// ---- Sums ---------------------------------------------------------------------------------------
// pairs: for the gradient
Tensor add_slots_kernel(const Tensor& rows, const Tensor& places, const MaybeTensor& base,
                        const MaybeTensor& pairs) {
  check_matrix("add_slots", "rows", rows);
  check_index("add_slots", "places", places, 2, rows);
  const Tensor out =
      torch_ops::empty(rows, {places.sym_size(0), rows.sym_size(1)}, rows.scalar_type());
  if (base) torch_ops::check_base("add_slots", *base, out.sym_sizes(), rows.device());
  if (pairs) {
    check_index("add_slots", "pairs", *pairs, 1, rows);
    TORCH_CHECK_VALUE(pairs->sym_size(0) == rows.sym_size(0), "add_slots: expected pairs of ",
                      rows.sym_size(0), " rows, got ", pairs->sym_size(0));
  }
  if (out.is_meta()) return out;
  bridge::check_memory("add_slots", "rows", rows);
  bridge::check_memory("add_slots", "places", places);
  if (base) bridge::check_memory("add_slots", "base", *base);
  if (pairs) bridge::check_memory("add_slots", "pairs", *pairs);
  bridge::check_sizes("add_slots", "the result", out);
  const Tensor from = adjacent(rows), at = places.contiguous(),
               begin = base ? base->contiguous() : Tensor();
  AddSlots sum;
  sum.rows = from.const_data_ptr();
  sum.dtype = rows.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  sum.count = from.size(0);
  sum.stride = from.stride(0);
  sum.cols = from.size(1);
  sum.places = at.const_data_ptr<std::int32_t>();
  sum.tokens = at.size(0);
  sum.slots = at.size(1);
  if (base) sum.base = begin.const_data_ptr<float>();
  sum.to = out.mutable_data_ptr();
  sum.device = bridge::backend_of(rows);
  bridge::with_value_errors([&] { add_slots(sum, bridge::ExecutionOn(rows)); });
  return out;
}

const torch_ops::Op take_rows_op("take_rows", take_rows_kernel);
const torch_ops::Op add_slots_op("add_slots", add_slots_kernel);
const torch_ops::Op pack_rows_op("pack_rows", pack_rows_kernel, torch_ops::refused());

}  // namespace

Tensor torch_ops::take_rows(const Tensor& x, const Tensor& index, const SymInt& slots,
                            const MaybeTensor& places) {
  return take_rows_op(x, index, slots, places);
}

Tensor torch_ops::add_slots(const Tensor& rows, const Tensor& places, const MaybeTensor& base,
                            const MaybeTensor& pairs) {
  return add_slots_op(rows, places, base, pairs);
}

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("row_layout", row_layout_of); }

}  // namespace minifloat
