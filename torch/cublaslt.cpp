// cuBLASLt counts in columns: it is asked for Dᵀ = b · aᵀ, whose columns are the rows of D.
//
//     D (m, n), rows adjacent  =  Dᵀ (n, m), columns adjacent  =  alpha · op(b) · op(a) + bias
//
// alpha and beta are read from device memory, sums stay in fp32 whatever the reduction, and the kernel that cuBLASLt's
// heuristic names is kept for the next product of the same sizes.
#include "cublaslt.h"

#if defined(MINIFLOAT_WITH_CUBLASLT)
#include <ATen/ATen.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>

#include "bridge.h"
#include "plain.h"
#endif

namespace minifloat::torch_ops {

#if defined(MINIFLOAT_WITH_CUBLASLT)
namespace {

constexpr std::int64_t kWorkspace = 32 << 20;  // bytes: what cuBLAS asks for on Hopper

// The functions of cuBLASLt, looked up at the first product and not linked: torch's CUDA build has loaded the library
// by then, from its own wheel, and a torch without CUDA needs none.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) init_product = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;

  // Whether every function was found: of the major version that this file was compiled against, whose ABI is stable.
  bool load() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!handle) return false;
    bool complete = true;
    const auto find = [&](auto& function, const char* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      complete = complete && function;
    };
    find(create, "cublasLtCreate");
    find(status_string, "cublasLtGetStatusString");
    find(init_product, "cublasLtMatmulDescInit_internal");
    find(set_product, "cublasLtMatmulDescSetAttribute");
    find(init_layout, "cublasLtMatrixLayoutInit_internal");
    find(init_preference, "cublasLtMatmulPreferenceInit_internal");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
    return complete;
  }
};

// Null where this process has no cuBLASLt.
const Library* library() {
  static Library functions;
  static const bool is_complete = functions.load();
  return is_complete ? &functions : nullptr;
}

void check(cublasStatus_t status) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "scaled_mm: expected cuBLASLt to succeed, got ",
              library()->status_string(status));
}

// One a device, for the life of the process; the current device's.
cublasLtHandle_t handle_of(const c10::Device& device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = handles.try_emplace(device.index(), nullptr);
  if (is_new) {
    const cublasStatus_t status = library()->create(&entry->second);
    if (status != CUBLAS_STATUS_SUCCESS) handles.erase(entry);
    check(status);
  }
  return entry->second;
}

// How a matrix (rows, k) lies, as cuBLASLt sees it.
struct Lie {
  cublasOperation_t operation;  // that makes it (rows, k), columns adjacent
  std::int64_t leading;         // elements from one column to the next

  bool operator<(const Lie& o) const {
    return std::tie(operation, leading) < std::tie(o.operation, o.leading);
  }
};

std::optional<Lie> lie_of(const Tensor& x) {
  if (x.stride(1) == 1 && x.stride(0) >= x.size(1)) return Lie{CUBLAS_OP_T, x.stride(0)};
  if (x.stride(0) == 1 && x.stride(1) >= x.size(0)) return Lie{CUBLAS_OP_N, x.stride(1)};
  return std::nullopt;
}

std::uint32_t alignment_of(const Tensor& x) {  // bytes, a power of two, at most 256
  const auto address = reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) | 256;
  return static_cast<std::uint32_t>(address & -address);
}

cudaDataType_t type_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? CUDA_R_32F : CUDA_R_16BF;
}

// What a kernel is chosen by.
struct Sizes {
  int device;
  std::int64_t m, n, k;
  Lie a, b;
  at::ScalarType dtype;
  bool has_bias;
  std::array<std::uint32_t, 3> alignment;  // of a, b, D

  bool operator<(const Sizes& o) const {
    return std::tie(device, m, n, k, a, b, dtype, has_bias, alignment) <
           std::tie(o.device, o.m, o.n, o.k, o.a, o.b, o.dtype, o.has_bias, o.alignment);
  }
};

// cuBLASLt's descriptions of one product; plain memory, nothing to release.
class Descriptions {
 public:
  explicit Descriptions(const Sizes& s, const void* bias) {
    check(library()->init_product(&product, sizeof(product), CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, std::int32_t{CUBLASLT_POINTER_MODE_DEVICE});
    set(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{s.b.operation});
    set(CUBLASLT_MATMUL_DESC_TRANSB,
        std::int32_t{s.a.operation == CUBLAS_OP_T ? CUBLAS_OP_N : CUBLAS_OP_T});
    if (s.has_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    check(layout(&b, CUDA_R_16BF, s.n, s.k, s.b));
    check(layout(&a, CUDA_R_16BF, s.m, s.k, s.a));
    check(library()->init_layout(&d, sizeof(d), type_of(s.dtype), static_cast<std::uint64_t>(s.n),
                                 static_cast<std::uint64_t>(s.m), s.n));
  }

  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, d;

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(library()->set_product(&product, attribute, &value, sizeof(value)));
  }
  // A matrix (rows, k) as it lies: with rows adjacent it is (k, rows) in columns.
  static cublasStatus_t layout(cublasLtMatrixLayout_t out, cudaDataType_t type, std::int64_t rows,
                               std::int64_t k, const Lie& lie) {
    const auto first = static_cast<std::uint64_t>(lie.operation == CUBLAS_OP_T ? k : rows);
    const auto second = static_cast<std::uint64_t>(lie.operation == CUBLAS_OP_T ? rows : k);
    return library()->init_layout(out, sizeof(*out), type, first, second, lie.leading);
  }
};

std::optional<cublasLtMatmulAlgo_t> choose(cublasLtHandle_t handle, const Sizes& s,
                                           Descriptions& described) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(library()->init_preference(&preference, sizeof(preference)));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(library()->set_preference(&preference, attribute, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.alignment[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.alignment[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.alignment[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.alignment[2]);
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status =
      library()->heuristic(handle, &described.product, &described.b, &described.a, &described.d,
                           &described.d, &preference, 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || count == 0) return std::nullopt;
  check(status);
  return found.algo;
}

std::optional<cublasLtMatmulAlgo_t> chosen(cublasLtHandle_t handle, const Sizes& s,
                                           Descriptions& described) {
  static std::mutex mutex;
  static std::map<Sizes, std::optional<cublasLtMatmulAlgo_t>> known;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(s); found != known.end()) return found->second;
  return known.emplace(s, choose(handle, s, described)).first->second;
}

// alpha and beta in device memory: the factors that the two sides owe, and zero.
struct Scalars {
  Tensor memory;  // (2): zero, the product of two factors
  const float *alpha, *beta;

  Scalars(const Tensor& a, const Tensor& b, cudaStream_t stream) {
    const Tensor& one = a.defined() ? a : b;
    memory = plain_empty(one, {2}, at::kFloat);
    beta = memory.const_data_ptr<float>();
    const cudaError_t status = cudaMemsetAsync(memory.mutable_data_ptr(), 0, sizeof *beta, stream);
    TORCH_CHECK(status == cudaSuccess, "scaled_mm: ", cudaGetErrorString(status));
    alpha = one.const_data_ptr<float>();
    if (!a.defined() || !b.defined()) return;
    Tensor product = plain_view(memory, at::kFloat, {}, 1);
    at::mul_out(product, a, b);
    alpha = beta + 1;
  }
};

}  // namespace

std::optional<Tensor> product_by_device_factor(const ExactSide& a, const ExactSide& b,
                                               const Result& result) {
  if (!library()) return std::nullopt;
  const auto lie_a = lie_of(a.values), lie_b = lie_of(b.values);
  if (!lie_a || !lie_b || (result.bias && result.dtype != at::kBFloat16)) return std::nullopt;
  const bridge::ExecutionOn here(a.values);
  const Execution& execution = here;
  const Tensor bias = result.bias ? result.bias->contiguous() : Tensor();
  const Tensor out = plain_empty(a.values, {a.values.size(0), b.values.size(0)}, result.dtype);
  const Sizes sizes = {
      .device = a.values.device().index(),
      .m = a.values.size(0),
      .n = b.values.size(0),
      .k = a.values.size(1),
      .a = *lie_a,
      .b = *lie_b,
      .dtype = result.dtype,
      .has_bias = bias.defined(),
      .alignment = {alignment_of(a.values), alignment_of(b.values), alignment_of(out)}};
  const cublasLtHandle_t handle = handle_of(a.values.device());
  Descriptions described(sizes, bias.defined() ? bias.const_data_ptr() : nullptr);
  const auto algorithm = chosen(handle, sizes, described);
  if (!algorithm) return std::nullopt;

  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const Scalars scalars(a.factor, b.factor, stream);
  const Tensor workspace = plain_empty(a.values, {kWorkspace}, at::kByte);
  void* d = out.mutable_data_ptr();
  check(library()->matmul(handle, &described.product, scalars.alpha, b.values.const_data_ptr(),
                          &described.b, a.values.const_data_ptr(), &described.a, scalars.beta, d,
                          &described.d, d, &described.d, &*algorithm, workspace.mutable_data_ptr(),
                          kWorkspace, stream));
  return out;
}
#else
std::optional<Tensor> product_by_device_factor(const ExactSide&, const ExactSide&, const Result&) {
  return std::nullopt;
}
#endif

}  // namespace minifloat::torch_ops
