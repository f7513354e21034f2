"""The private names of torch that this library reads, each with what it is read for.

No other module reads one (tools/check_layers.py), but distributed/fsdp/private_state.py: of FSDP2's
objects. tests/test_private_torch.py has a check of each on the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as WithoutTorchFunction
from torch._C import DispatchKey
from torch._C import _SetExcludeDispatchKeyGuard as ExcludeDispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = [
    "DTensorSpec",
    "ExcludeDispatchKey",
    "FakeTensor",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "WithoutTorchFunction",
    "disable_current_modes",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

Called = TypeVar("Called", bound=Callable[..., Any])

# Functions that torch has no public name for. Bound, so that a call costs no look-up more.
copy_all_ = torch._foreach_copy_  # (to, from): one kernel for a list of tensors
norms_of = torch._foreach_norm  # (tensors, order): the norm of each, by few kernels
grouped_mm = torch._grouped_mm  # what F.grouped_mm was called, and other libraries still call
sleep_cycles = torch.cuda._sleep  # (clock cycles): keeps the GPU busy
# (device index) -> the current stream's handle; a torch without CUDA has none
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
tracing_state = torch._C._get_tracing_state  # None outside torch.jit.trace
is_transformed = torch._C._are_functorch_transforms_active  # within a transform of torch.func
backward_id = torch._C._current_graph_task_id  # of the backward pass in this thread; -1: none
# (True) -> the hooks for saved tensors that were set last, or None
saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
engine = torch.autograd.Variable._execution_engine
current_node = torch._C._current_autograd_node  # whose backward pass this thread runs, or None
next_node_number = torch._C._autograd._get_sequence_nr  # of the node that this thread makes next

COUNTS_WRITES = DispatchKey.ADInplaceOrView  # the key of kernels that count writes to a tensor


def collective_ops() -> list[OpOverload]:
    """Returns the functional collectives whose results other ranks have a part in."""
    names = "all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"
    return [getattr(torch.ops._c10d_functional, name).default for name in names]


def has_transform() -> bool:
    """Tells whether a transform of torch.func is under way, also where is_transformed is off."""
    return bool(torch._C._functorch.peek_interpreter_stack())


def compile_within_alone(code: Any) -> None:
    """Lets compiled code contain the function with this code, and never be the function alone."""
    dynamo = torch._C._dynamo.eval_frame  # torch._dynamo itself takes seconds to import
    alone, called = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(alone, called))


def constant_in_graphs(function: Called) -> Called:
    """Makes results constants of a graph, as torch.compiler.assume_constant_result does.

    That imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def tag_compiled_code(tag: str) -> None:
    """Adds a tag to the key of the code that torch.compile keeps on disk, beside a user's own."""
    config: Any = torch.compiler.config
    if tag not in config.cache_key_tag.split():
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".lstrip()


def is_compiler_tracing() -> bool:
    """Tells whether torch.compile traces code, or what autograd and tensors do in it."""
    return torch._guards.TracingContext.try_get() is not None


def is_wrapper(t: Tensor) -> bool:
    """Tells whether a tensor has kernels in Python, as a wrapper of other tensors does."""
    return bool(torch._C._dispatch_keys(t).has(DispatchKey.Python))


def refuse_addresses(t: Tensor, message: str) -> None:
    """Has C++ that asks for the address of a tensor's memory raise a RuntimeError of this text."""
    torch._C._set_storage_data_ptr_access_error_msg(t.untyped_storage()._cdata, message)


def has_fast_bf16() -> bool:
    """Tells whether this CPU multiplies bf16 fast (x86-64 with AVX-512)."""
    mkldnn = torch.backends.mkldnn.is_available()
    return bool(mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def all_gather_with_gradient(t: Tensor, dim: int, group: Any) -> Tensor:
    """Gathers t of all ranks along dim; backward scatters the sums."""
    # The import takes 50 ms.
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    return all_gather_tensor_autograd(t, dim, group)


def schema_info(first: int, named: list[str] | None) -> Any:
    """Returns what DTensor caches shardings by: arguments from `first` on, and those `named`."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    return RuntimeSchemaInfo(first, named, needs_pytree=True)
