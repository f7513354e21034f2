// The cached codes of one weight. python/minifloat/nn/cache/operand_cache.py describes when codes
// are reused, and what of that a user notices. A read of the weight, in this order:
//
//     key        what torch tells of the weight's state, the recipe and the conditions
//     use        whether the last read had this key, so that codes are worth holding
//     codes      held ones where their key, and on a CPU their fingerprint, are those of now; else
//                those of a cast now
//
// Threads share a cache: codes are replaced as a whole and never changed, and no lock is held while
// bytes are hashed or cast.
#pragma once

#include <c10/core/Storage.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/operands.h"

namespace minifloat::torch_ops {

// One forward's read of a weight.
struct WeightRead {
  const Tensor& weight;  // the parameter, perhaps a DTensor
  const Tensor& matrix;  // W (…, N, K) of this rank, what a cast reads of the parameter
  const Tensor& x;       // whose dtype and device are the product's
  const std::string& recipe;
  bool columnwise;    // whether a backward pass would read the weight
  bool training;      // whether the module is in training mode
  bool saves_weight;  // whether the layer saves a weight without codes
  std::optional<Tensor> amax_history = {};
  std::optional<Tensor> main_grad = {};  // where backward adds the gradient instead of .grad
  std::optional<std::int64_t> fingerprint = {};  // the sum of all ranks'; none: it is not compared
  Sharding sharding = {};
};

class WeightCodes : public torch::CustomClassHolder {
 public:
  // Returns a new cache, which `find` finds by its id.
  // compares_bytes: false: decides on a CPU as on CUDA, where a weight has no fingerprint
  static c10::intrusive_ptr<WeightCodes> make(bool compares_bytes);
  WeightCodes(std::int64_t id, bool compares_bytes) : id_(id), compares_bytes_(compares_bytes) {}

  // The number by which ops are told of a cache. torch asks each argument that is an object of a
  // native class for a __torch_function__, which takes 20 us.
  std::int64_t id() const { return id_; }
  // Returns the cache of an id; null for 0. Raises ValueError where there is none.
  static c10::intrusive_ptr<WeightCodes> find(std::int64_t id);

  // Returns a weight's operands, cached or cast now; none: the layer is to quantize it.
  std::optional<std::vector<Tensor>> operands(const WeightRead& read);

  void forget();      // the weight may have changed
  void start_over();  // forgets, and expects no reuse: training, evaluation or tracing has begun
  void capture();     // a CUDA graph captures a forward: its replays write without being counted

  std::optional<std::vector<Tensor>> held() const;  // the codes
  void release_resources() override;                // once no layer has the cache

 private:
  // What torch tells of a weight. Equal states show the same storage only while a weak reference
  // to it keeps its address from being reused.
  struct State {
    const void *weight, *storage;
    std::uint32_t version, matrix_version;
    std::int64_t offset;
    c10::DimVector sizes, strides;
    std::int64_t steps;
    const PreparedRecipe* recipe;
    bool operator==(const State&) const = default;
  };
  struct Key {
    State state;
    at::ScalarType dtype;  // of the product
    bool is_inference;
    c10::StreamId stream;
    std::optional<std::int64_t> fingerprint;
    bool operator==(const Key&) const = default;
  };
  struct Use {
    Key key;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  struct Codes {
    Use use;
    std::optional<std::uint64_t> hash;  // none: an equal key, or the gradient, suffices
    std::vector<Tensor> tensors;
    bool has_columnwise;
  };
  using Gradient = std::optional<std::pair<const void*, std::uint32_t>>;

  static Key key_of(const WeightRead& read);
  static bool is_next_micro_batch(const Gradient& before, const Gradient& now);
  static Gradient gradient_of(const WeightRead& read);
  // Records a use. Returns whether codes will be read again; those that are held are of this use
  // where is_reused_ is true then. is_shown: whether the key or a fingerprint shows that codes are
  // current; else `gradient` does
  bool is_second_use(const WeightRead& read, const Key& key, bool is_shown,
                     const Gradient& gradient);

  const std::int64_t id_;
  const bool compares_bytes_;
  mutable std::mutex mutex_;  // of what follows; no tensor is freed under it, which may take a GIL
  bool is_captured_ = false;
  std::optional<Use> last_;  // in which the weight was read last
  Gradient gradient_;        // at the weight's last use, main_grad or .grad: identity and version
  bool is_reused_ = false;   // whether the weight was read twice in the state of last_
  std::shared_ptr<const Codes> codes_;
  // A state of the weight, and whether layers that would save it have codes of it. A checkpointed
  // forward must save the same again, so all forwards with one state have codes, or none has.
  std::optional<std::pair<State, bool>> form_;
};

}  // namespace minifloat::torch_ops
