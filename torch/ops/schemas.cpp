// The schemas of the ops of the library, except those that torch.compile records of layers, which
// recorded_schemas.cpp has. Kernels are registered beside their code: ops/, products/,
// layers/ and sharded/.
//
// Specs, products and recipes are passed as text. A quantized operand is three tensors: codes,
// scale and amax (docs/reference/grammar.md).
#include <torch/library.h>

#include <string>
#include <vector>

#include "layers/expert_rows.h"
#include "layers/sharding.h"
#include "minifloat/core/hadamard.h"

namespace minifloat {

TORCH_LIBRARY(minifloat, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // Groups of rows (core/groups.h). offs: int32 (groups), the end of each. Ops take the table that
  // group_table returns, and the unit of groups along the contraction dimension. check_groups:
  // whether group_table raises for ends that it would move, in the name of `op`; returns the former
  // choice.
  m.def("group_table(Tensor offs, SymInt rows, *, str op='group_table') -> Tensor", tags);
  m.def("check_groups(bool enabled) -> bool");

  // Values. x: (rows, cols) or (batch, rows, cols), fp32 or bf16, of column stride 1.
  // rows_from: the row of x of each row that is cast, int32 (rows), with groups. fp8: FP4 is
  // written as fp4_as_fp8 returns it. swizzled: scales are as swizzle_scales returns them for each
  // row, shaped (…, tiles down, tiles across, 512).
  m.def(
      "amax(Tensor x, str spec, bool columnwise=False, *, Tensor? rng=None, int stream=0, "
      "Tensor? groups=None, Tensor? rows_from=None) -> Tensor",
      tags);
  m.def(
      "quantize(Tensor x, str row, str col, *, Tensor? amax_row=None, Tensor? amax_col=None, "
      "Tensor? rng=None, int stream_row=0, int stream_col=0, SymInt[2] origin=0, "
      "Tensor? groups=None, int group_unit=0, Tensor? row_ids=None, int first_expert=0, "
      "Tensor? rows_from=None, bool decoded_row=False, bool decoded_col=False, "
      "bool fp8_row=False, bool fp8_col=False, bool swizzled_row=False, "
      "bool swizzled_col=False, bool amaxes_of_columns=False) -> "
      "(Tensor codes_row, Tensor scale_row, Tensor amax_row, Tensor decoded_row, "
      "Tensor codes_col, Tensor scale_col, Tensor amax_col, Tensor decoded_col)",
      tags);
  // quantize by the amax history of a layer: +delayed directions scale by column 0 of a row, and
  // raise column 1. Their amaxes are not returned.
  m.def(
      "quantize_delayed(Tensor x, str row, str col, Tensor(a!) amax_history, int history_row, "
      "int history_col, *, Tensor? rng=None, int stream_row=0, int stream_col=0, "
      "Tensor? groups=None, int group_unit=0, Tensor? row_ids=None, int first_expert=0, "
      "Tensor? rows_from=None, bool decoded_row=False, bool decoded_col=False) -> "
      "(Tensor codes_row, Tensor scale_row, Tensor amax_row, Tensor decoded_row, "
      "Tensor codes_col, Tensor scale_col, Tensor amax_col, Tensor decoded_col)",
      tags);
  m.def(
      "dequantize(Tensor codes, Tensor scale, Tensor amax, str spec, SymInt cols, *, "
      "ScalarType dtype=float, Tensor? groups=None, int group_unit=0) -> Tensor",
      tags);
  m.def(
      "decode(Tensor codes, Tensor scale, str spec, SymInt cols, *, Tensor? groups=None, "
      "int group_unit=0) -> Tensor",
      tags);
  m.def(
      "fp4_as_fp8(Tensor codes, Tensor scale, Tensor amax, str spec, SymInt cols, *, "
      "Tensor? groups=None, int group_unit=0) -> (Tensor fp8_codes, Tensor row_scale)",
      tags);

  // What casts did to n matrices x (rows, cols), in float64 (n, numbers): those that
  // statistic_names names, then a histogram of the scales, 256 counts by the exponent field of
  // fp32. batch_index: of each x in a batch, whose random bits it draws. result_error: of n results
  // (rows, cols) the sums of squares of d = result - reference and of the reference; with the
  // gradients of the loss also the sum of gradient * d, and the sum of squares of its sums of rows,
  // (n, 4).
  m.def("statistic_names() -> str[]");
  m.def(
      "operand_statistics(Tensor[] x, str spec, bool columnwise=False, *, Tensor[]? amax=None, "
      "Tensor? rng=None, int stream=0, int batch_index=0) -> Tensor",
      tags);
  m.def("result_error(Tensor[] results, Tensor[] references, Tensor[]? gradients=None) -> Tensor",
        tags);

  // Transforms.
  const std::string signs = std::to_string(kHadamardSigns);
  m.def(("hadamard(Tensor x, int points=16, bool columnwise=False, int signs=" + signs +
         ", *, Tensor? groups=None, int group_unit=0) -> Tensor")
            .c_str(),
        tags);
  m.def("swizzle_scales(Tensor scale, *, Tensor? offs=None, str groups=\"\") -> Tensor", tags);
  m.def(
      "unswizzle_scales(Tensor swizzled, SymInt rows, SymInt cols, *, Tensor? offs=None, "
      "str groups=\"\") -> Tensor",
      tags);
  m.def("transpose_codes(Tensor codes, SymInt cols) -> Tensor", tags);
  // An MX or NVFP4 operand as torch's block-scaled products read it: a copy of the codes under
  // torch's dtype, swizzled scales, and the ScalingType and SwizzleType of each.
  m.def(
      "block_scaled_operand(Tensor codes, Tensor scale, Tensor amax, str spec, SymInt cols) -> "
      "(Tensor codes, Tensor[] scales, int[] scaling, int[] swizzle)",
      tags);

  // Products. a, b: packed codes, their bf16 values, FP4 as FP8 codes (the two outputs of the op
  // fp4_as_fp8), or under bf16 the operand itself.
  m.def(
      "scaled_mm(Tensor a, Tensor a_scale, Tensor a_amax, Tensor b, Tensor b_scale, Tensor b_amax, "
      "str product, *, SymInt k, Tensor? bias=None, ScalarType out_dtype=bfloat16, "
      "Tensor? groups=None, int group_unit=0, bool zero_tail=False) -> Tensor",
      tags);
  // Adds the fp32 product to sum, float32 (m, n), in place.
  m.def(
      "add_scaled_mm(Tensor(a!) sum, Tensor a, Tensor a_scale, Tensor a_amax, Tensor b, "
      "Tensor b_scale, Tensor b_amax, str product, *, SymInt k) -> ()",
      tags);

  // The arguments of torch's block-scaled product of groups, aten::_scaled_grouped_mm_v2, of
  // operands under MXFP8, MXFP4 or NVFP4: both codes (b's transposed), then for a and for b the
  // swizzled scales with their ScalingType and SwizzleType, and the groups' ends.
  m.def(
      "block_scaled_grouped_operands(Tensor a, Tensor a_scale, Tensor a_amax, Tensor b, "
      "Tensor b_scale, Tensor b_amax, str product, *, SymInt k, Tensor groups, int group_unit=0) "
      "-> "
      "(Tensor a, Tensor b, Tensor[] a_scales, int[] a_scaling, int[] a_swizzle, "
      "Tensor[] b_scales, int[] b_scaling, int[] b_swizzle, Tensor ends)",
      tags);

  // Shards of codes that ranks gathered, merged into whole flat codes (sharded/fragments.cpp).
  m.def("merge_fragments(Tensor gathered, Tensor(a!)[] wires, int[] layout, int ranks) -> ()",
        tags);

  // A reduce-scatter of codes (minifloat/messages.h). x: (ranks, cols), a row a message.
  // sum_messages writes the sum of what all ranks have sent, in their order. message_bytes: of one
  // of `cols` values; raises for a spec that no message can have.
  m.def("quantize_messages(Tensor x, str spec, *, Tensor? rng=None, int stream=0) -> Tensor", tags);
  m.def("sum_messages(Tensor messages, str spec, Tensor(a!) out) -> ()", tags);
  m.def("message_bytes(str spec, int cols) -> int");

  // Layers. layer_operands: the operands of x ("x") or of a weight ("w") as `linear` quantizes it,
  // for later calls of `linear`. recompute: "weight" where backward quantizes the weight again
  // instead of saving its codes. accumulate, received: where backward adds the weight's gradient,
  // and what autograd receives, as layers/weight_sums.h describes. linear_sharded: `linear` on one
  // rank of `group`, whose ranks shard the weight along weight_dim and x along token_dim; sum_dx:
  // whether backward sums dx over the ranks, of a whole x; see layers/sharding.h. weight_cache: the
  // id of the cache that has weight_operands where the caller passes none, or 0; training: whether
  // the layer is in training mode, which the cache reads.
  torch_ops::register_gathered_input();
  m.def(
      "layer_operands(Tensor x, str recipe, str of, *, bool rowwise=True, bool columnwise=True, "
      "Tensor(a!)? amax_history=None, str group=\"\", int rank=0, int ranks=1, int weight_dim=0, "
      "int? token_dim=None, Tensor? groups=None, Tensor? rows_from=None) -> Tensor[]",
      tags);
  m.def(
      "linear_sharded(Tensor x, Tensor weight, Tensor? bias, str recipe, *, str group, int rank, "
      "int ranks, int weight_dim, int? token_dim=None, Tensor? rng=None, "
      "Tensor(a!)? amax_history=None, int stream=0, Tensor[]? x_operands=None, "
      "Tensor[]? weight_operands=None, "
      "__torch__.torch.classes.minifloat.GatheredInput? gathered=None, bool sum_dx=False, "
      "str recompute=\"\", "
      "Tensor(b!)? main_grad=None, str accumulate=\"\", str received=\"\") -> Tensor",
      tags);
  m.def("token_unit(str recipe) -> int");
  m.def("shard_multiple(str spec, bool columnwise, int dim) -> int");
  m.def("operand_names() -> str[]");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, str recipe, *, Tensor? rng=None, "
      "Tensor(a!)? amax_history=None, int stream=0, Tensor[]? x_operands=None, "
      "Tensor[]? weight_operands=None, str recompute=\"\", Tensor(b!)? main_grad=None, "
      "str accumulate=\"\", str received=\"\", "
      "int weight_cache=0, bool training=False) -> Tensor",
      tags);
  // An MLP of 2 weights (up, down) or 3 (gate, up, down) under one recipe: activation "silu",
  // "gelu" or "gelu_tanh". x is quantized once, with the random stream and the history of the first
  // weight; the second's history takes the same amax. weight_operands: eight tensors a weight.
  // recompute: "weight" where backward quantizes weights again. main_grads: one a weight, of which
  // a frozen one's is any tensor.
  m.def(
      "mlp(Tensor x, Tensor[] weights, Tensor?[] biases, str recipe, str activation, *, "
      "Tensor[]? rng=None, Tensor(a!)[]? amax_history=None, int[]? streams=None, "
      "Tensor[]? x_operands=None, Tensor[]? weight_operands=None, str recompute=\"\", "
      "Tensor(b!)[]? main_grads=None, str accumulate=\"\", str received=\"\") -> Tensor",
      tags);
  m.def(
      "linear_group(Tensor x, Tensor[] weights, Tensor?[] biases, str recipe, *, "
      "Tensor[]? rng=None, Tensor(a!)[]? amax_history=None) -> Tensor[]",
      tags);

  // Products of experts: rows of A (M, K), in groups that end at offs, times B (E, K, N). tail:
  // "zero" or "undefined", the rows of the results past the last end. recompute: "weight" where
  // backward quantizes B again.
  m.def(
      "scaled_grouped_mm(Tensor A, Tensor B, Tensor offs, str recipe, *, "
      "ScalarType out_dtype=bfloat16, Tensor? bias=None, Tensor? rng=None, Tensor? row_ids=None, "
      "int first_expert=0, Tensor(a!)? amax_history=None, str tail=\"zero\", int stream=0, "
      "Tensor[]? a_operands=None, Tensor[]? weight_operands=None, str recompute=\"\") -> Tensor",
      tags);
  // On one rank of `group`, whose ranks shard W (E, N, K), the transpose of B, along weight_dim, N
  // (0) or K (1): y's columns, or a term of the sum over ranks. weight_parts: see
  // layers/sharding.h.
  m.def(
      "scaled_grouped_mm_sharded(Tensor A, Tensor B, Tensor offs, str recipe, *, str group, "
      "int rank, int ranks, int weight_dim, int weight_parts=1, ScalarType out_dtype=bfloat16, "
      "Tensor? bias=None, Tensor? rng=None, Tensor? row_ids=None, Tensor(a!)? amax_history=None, "
      "int stream=0, Tensor[]? weight_operands=None, str recompute=\"\") -> Tensor",
      tags);
  // The gradients of A, B and bias that are needed, from A and B instead of saved operands.
  // grad_rows_from: the row of grad of each row of y, int32 (M), where no spec of grad is bf16.
  // g_operands: eight tensors, of which dgrad reads the rowwise ones instead of a cast of grad.
  m.def(
      "scaled_grouped_mm_backward(Tensor grad, Tensor A, Tensor B, Tensor offs, str recipe, "
      "bool[3] needed, *, Tensor? bias=None, Tensor? rng=None, Tensor? row_ids=None, "
      "int first_expert=0, Tensor(a!)? amax_history=None, str tail=\"zero\", int stream=0, "
      "Tensor[]? a_operands=None, Tensor[]? weight_operands=None, Tensor? grad_rows_from=None, "
      "Tensor[]? g_operands=None) -> (Tensor, Tensor, Tensor)",
      tags);

  // The feed-forward of experts, from tokens x (T, D) to tokens: see layers/grouped_mlp.cpp. order:
  // pairs, places, offs and row_ids, as layers/expert_rows.h describes. matrices: B (E, K, N) of
  // gate, up and the output, or of both gate and up and the output. biases, recipes, rng,
  // amax_history, streams, recompute: one a matrix, except that the output has no bias.
  // weight_operands: eight tensors a matrix, empty ones where the product casts it. x_operands:
  // those of the tokens. base: fp32 (T, D), which the rows of tokens are added to; without sums,
  // rows are returned. group: the ranks that cut the matrices along I. x_codes: codes, scale and
  // amax of x, which has its shape alone; gradient: takes those of the gradient of rows
  // (layers/expert_rows.h).
  torch_ops::register_gradient_codes();
  m.def(
      "grouped_mlp(Tensor x, Tensor weights, Tensor[] order, Tensor[] matrices, Tensor?[] biases, "
      "str[] recipes, *, Tensor? base=None, bool sums=True, float? limit=None, float alpha=1.702, "
      "bool interleaved=False, Tensor?[]? rng=None, int first_expert=0, "
      "Tensor(a!)?[]? amax_history=None, int[] streams, Tensor[]? x_operands=None, "
      "Tensor[]? weight_operands=None, str[] recompute, str group=\"\", int rank=0, int ranks=1, "
      "Tensor[]? x_codes=None, "
      "__torch__.torch.classes.minifloat.GradientCodes? gradient=None) -> Tensor",
      tags);

  // Between the products of experts. swiglu: of one product (M, 2 I), or of gate and up (M, I), and
  // float32 weights, one a row, at `pairs`, int32 (M), or in order. Rows past the last group are
  // zeros. take_rows: row r is x's row index[r] / slots; places, (x's rows, slots), is the inverse
  // of index, makes it faster, and is what its gradient reads. add_slots: row t is base[t] plus the
  // rows at places[t], in fp32 and in order; its gradient reads pairs, the inverse of places. A
  // place -1 adds nothing, and then there is no gradient.
  m.def(
      "swiglu(Tensor product, Tensor? other, Tensor weights, *, float? limit=None, "
      "float alpha=1.702, bool interleaved=False, Tensor? pairs=None, Tensor? groups=None) -> "
      "Tensor",
      tags);
  // The eight tensors of `quantize` of swiglu's result, which need not be in a GPU's memory.
  m.def(
      "quantize_swiglu(Tensor product, Tensor? other, Tensor weights, str row, str col, *, "
      "float? limit=None, float alpha=1.702, bool interleaved=False, Tensor? pairs=None, "
      "Tensor? groups=None, int group_unit=0, Tensor? amax_row=None, Tensor? amax_col=None, "
      "Tensor? rng=None, int stream_row=0, int stream_col=0, Tensor? row_ids=None, "
      "int first_expert=0, bool decoded_row=False, bool decoded_col=False, "
      "bool amaxes_of_columns=False) -> "
      "(Tensor codes_row, Tensor scale_row, Tensor amax_row, Tensor decoded_row, "
      "Tensor codes_col, Tensor scale_col, Tensor amax_col, Tensor decoded_col)",
      tags);
  // The operands of swiglu's result as the x of a product under `recipe`, for later calls of
  // scaled_grouped_mm or `linear`: as layer_operands returns those of x. A direction under bf16 has
  // none.
  m.def(
      "swiglu_operands(Tensor product, Tensor? other, Tensor weights, str recipe, *, "
      "float? limit=None, float alpha=1.702, bool interleaved=False, Tensor? pairs=None, "
      "Tensor? groups=None, bool rowwise=True, bool columnwise=True, Tensor? rng=None, "
      "Tensor? row_ids=None, int first_expert=0, Tensor(a!)? amax_history=None, int stream=0) -> "
      "Tensor[]",
      tags);
  // amaxes: of groups, what casts of the gradients scale by: of d_product, and of d_other where it
  // is, float32 (M) of the rows before the last group's end and (groups, columns).
  m.def(
      "swiglu_backward(Tensor dh, Tensor product, Tensor? other, Tensor weights, *, "
      "float? limit=None, float alpha=1.702, bool interleaved=False, Tensor? pairs=None, "
      "Tensor? groups=None, bool amaxes=False) -> "
      "(Tensor d_product, Tensor d_other, Tensor d_weights, Tensor[] amaxes)",
      tags);

  // Activations of dense layers: "silu", "gelu" or "gelu_tanh" of gate, times up if there is one.
  // The casts take matrices, and return the tensors of `quantize` of the results: eight of h; eight
  // of d_gate, eight of d_up where there is an up, and four of h columnwise where h_col is a spec.
  m.def("activation(Tensor gate, Tensor? up, str activation) -> Tensor", tags);
  m.def(
      "activation_backward(Tensor dh, Tensor gate, Tensor? up, str activation) -> "
      "(Tensor d_gate, Tensor d_up)",
      tags);
  m.def(
      "quantize_activation(Tensor gate, Tensor? up, str activation, str row, str col, *, "
      "Tensor? amax_row=None, Tensor? amax_col=None, Tensor? rng=None, int stream_row=0, "
      "int stream_col=0, SymInt[2] origin=0, bool decoded_row=False, bool decoded_col=False, "
      "bool fp8_row=False, bool fp8_col=False, bool swizzled_row=False, "
      "bool swizzled_col=False) -> "
      "(Tensor codes_row, Tensor scale_row, Tensor amax_row, Tensor decoded_row, "
      "Tensor codes_col, Tensor scale_col, Tensor amax_col, Tensor decoded_col)",
      tags);
  m.def(
      "quantize_activation_backward(Tensor dh, Tensor gate, Tensor? up, str activation, str row, "
      "str col, str h_col, *, Tensor? gate_amax_row=None, Tensor? gate_amax_col=None, "
      "Tensor? up_amax_row=None, Tensor? up_amax_col=None, Tensor? h_amax=None, "
      "Tensor? gate_rng=None, Tensor? up_rng=None, Tensor? h_rng=None, int gate_stream_row=0, "
      "int gate_stream_col=0, int up_stream_row=0, int up_stream_col=0, int h_stream=0, "
      "bool decoded_row=False, bool decoded_col=False, bool decoded_h=False, "
      "bool fp8_row=False, bool fp8_col=False, bool fp8_h=False, bool swizzled_row=False, "
      "bool swizzled_col=False, bool swizzled_h=False) -> Tensor[]",
      tags);
  // dh becomes d_gate. amaxes: of d_gate and, with an up, of d_up, untransformed. h is cast
  // columnwise where h_col is a spec.
  m.def(
      "activation_gradients_(Tensor(a!) dh, Tensor gate, Tensor? up, str activation, str h_col, *, "
      "Tensor? h_amax=None, Tensor? h_rng=None, int h_stream=0, bool decoded_h=False) -> "
      "(Tensor d_up, Tensor amaxes, Tensor codes_h, Tensor scale_h, Tensor amax_h, "
      "Tensor decoded_h_values)",
      tags);
  m.def("take_rows(Tensor x, Tensor index, SymInt slots=1, *, Tensor? places=None) -> Tensor",
        tags);
  m.def("add_slots(Tensor rows, Tensor places, Tensor? base=None, *, Tensor? pairs=None) -> Tensor",
        tags);
  // Rows of bytes, uint8 (M, bytes): fields (rows, columns) or (rows) side by side. Row n has the
  // row index[n] / slots of a field with slots, else the field's row n. rows_from, int32: n of each
  // row of the result, -1 of a row of zeros. row_layout: of fields of these bytes a row, where each
  // begins, then the bytes of a row.
  m.def(
      "pack_rows(Tensor[] fields, Tensor? index=None, *, int[] slots=[], Tensor? rows_from=None) "
      "-> Tensor",
      tags);
  m.def("row_layout(int[] field_bytes) -> int[]");

  // A step of delayed scaling. histories: float32 (…, 1 + length), of one shape. Column 0 is the
  // active amax, column 1 the current amax of this step. algorithm: "max" or "most_recent".
  // margin: powers of two.
  m.def("roll_amax_histories(Tensor(a!)[] histories, *, str algorithm=\"max\", int margin=0) -> ()",
        tags);

  // Adds one to the count of a random state, int64 (seed, count), and returns a copy; in inference
  // mode a copy alone. in_forward: raises where autograd recomputes the caller.
  m.def("advance_random_state(Tensor(a!) state, *, bool in_forward=False) -> Tensor", tags);

  // Text. Python calls these ops, so that C++ has the only parser.
  // bits: of an element, block scales included. block: rows and columns that share a block scale,
  // (0, 0) where there is none; transform: points, or 0. alignment: a cut at multiples splits no
  // block, transform or byte of codes. amax_of: "tensor", "row" or "". transposes: whether the
  // codes of one direction, transposed, are those of the other. draws_signs: of its transform.
  // rows_alone: whether the codes of a row depend on no other row and on no random bits.
  m.def(
      "spec_info(str spec) -> (str text, str elements, str rule, str scale_dtype, str amax_of, "
      "int code_bits, float bits, int[] block, int[] alignment, int group_unit, int transform, "
      "bool bf16, bool blocks, bool stochastic, bool delayed, bool fp4_by_powers_of_two, "
      "bool transposes, bool draws_signs, bool rows_alone)");
  m.def("product_info(str product) -> (str a, str b, bool fast)");
  m.def("parse_recipe(str recipe) -> str[]");
  m.def("parse_recipe_map(str map) -> str[]");
  m.def("match_recipe(str map, str module) -> str");
  m.def("preset_names() -> str[]");
  m.def("spec_sizes(str spec, int rows, int cols) -> int[]");
  m.def("even_cuts(int rows, int cols, int ranks) -> int[]");
  m.def("fragment_layout(str[] specs, int[] cols, int[] cuts, int ranks) -> int[]");
  m.def(
      "engine_of(str product, int capability, *, int m, int n, int k, "
      "ScalarType out_dtype=bfloat16, bool bias=False, str groups=\"\") -> str");
  m.def(
      "engine_info(str product, int capability, *, str groups=\"\") -> "
      "(str name, bool native, str does)");
  m.def("assume_capability(int capability) -> ()");
  m.def("stream(str name) -> int");
  m.def("mix_seed(int seed, int count) -> int");
  m.def("autograd_threads() -> (int here, int node)");
  m.def("has_cuda() -> bool");
  m.def("cuda_targets() -> str");
}

}  // namespace minifloat
