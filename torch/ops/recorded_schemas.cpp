// The schemas of what torch.compile records of layers, besides the cast of x. An op that writes to
// amax histories, of delayed scaling, is one of its own: a trace treats an op that may write as one
// that does.
#include <torch/library.h>

#include <string>
#include <vector>

namespace minifloat {
namespace {

std::string tensors(int count) {
  std::string text = "Tensor";
  for (int i = 1; i < count; ++i) text += ", Tensor";
  return text;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  for (const bool is_delayed : {false, true}) {
    const std::string suffix = is_delayed ? "_delayed" : "", write = is_delayed ? "(a!)" : "";
    const auto define = [&](const std::string& name, const std::string& arguments,
                            const std::string& results) {
      m.def((name + suffix + "(" + arguments + ") -> (" + results + ")").c_str(), tags);
    };

    // Of one `linear` (layers/layer_ops.h). x: as `quantize` returns it, rowwise. The results are y
    // and W as backward reads it, empty where not; then dx, dW and db, of those that are needed.
    // saved: three tensors of x, then three of W. swizzled: the scales of that W are. groups: of
    // the rows of experts, whose weight is B (E, K, N); the rest is as in scaled_grouped_mm.
    const std::string state = "Tensor? rng, Tensor" + write + "? amax_history, int stream";
    const std::string groups =
        ", Tensor? groups=None, Tensor? row_ids=None, int first_expert=0, bool zero_tail=True";
    define("linear_forward",
           "Tensor x_codes, Tensor x_scale, Tensor x_amax, Tensor x_decoded, Tensor weight, "
           "Tensor? bias, str recipe, ScalarType dtype, bool needs_dx, str recompute, " +
               state + ", bool swizzled=False, ScalarType? out_dtype=None" + groups,
           "Tensor y, Tensor codes, Tensor scale, Tensor amax");
    define("linear_backward",
           "Tensor grad, Tensor[] saved, str recipe, bool[3] needed, SymInt k, "
           "ScalarType x_dtype, ScalarType product_dtype, ScalarType weight_dtype, "
           "ScalarType? bias_dtype, " +
               state + groups,
           "Tensor dx, Tensor dw, Tensor db");

    // Of a whole `mlp` (layers/mlp_ops.h), of 2 or 3 weights. needed: dx, dh and the gradient of
    // the last weight. saved: three tensors of x, of each weight that reads x, of h and of the last
    // weight, then gate and up. forward returns y and saved without x, empty where not needed, and
    // backward dx, three dW and three db.
    const std::string states = "Tensor[] rng, Tensor" + write + "[] amax_history, int[] streams";
    define("mlp_forward",
           "Tensor x_codes, Tensor x_scale, Tensor x_amax, Tensor x_decoded, Tensor[] weights, "
           "Tensor?[] biases, str recipe, str activation, ScalarType dtype, bool[3] needed, "
           "str recompute, " +
               states + ", bool[2] swizzled",
           tensors(15));
    define("mlp_backward",
           "Tensor grad, Tensor[] saved, str recipe, str activation, bool needs_dx, "
           "bool[3] needs_dw, bool[3] needs_db, SymInt k, ScalarType x_dtype, "
           "ScalarType product_dtype, ScalarType weight_dtype, ScalarType bias_dtype, " +
               states,
           tensors(7));
  }
}

}  // namespace minifloat
