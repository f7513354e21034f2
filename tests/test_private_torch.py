"""Each private name of torch that the library reads does what it is read for, with this torch."""

import math

import pytest
import torch
from minifloat import private_torch as private
from minifloat.distributed.fsdp.private_state import let_fsdp_assign
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_lists_are_copied():
    to = [torch.zeros(2), torch.zeros(3)]
    private.copy_all_(to, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in to] == [[1, 1], [2, 2, 2]]


def test_norms_of_tensors_have_their_inf_and_nan():
    tensors = [torch.tensor(values) for values in ([3.0, -4.0], [1.0, math.nan], [-math.inf, 0.0])]
    norms = torch.stack(private.norms_of(tensors, math.inf))
    torch.testing.assert_close(norms, torch.tensor([4.0, math.nan, math.inf]), equal_nan=True)


def test_addresses_are_refused_until_a_tensor_is_freed():
    t, other = torch.ones(2), torch.ones(2)
    private.refuse_addresses(t, "no memory")
    for read in (t.data_ptr, t.untyped_storage().data_ptr, lambda: torch.add(t, 1)):
        with pytest.raises(RuntimeError, match=r"^no memory"):
            read()
    assert (other + 1).tolist() == [2, 2]


def test_what_tracing_is():
    found = []

    class Noted(nn.Module):
        def forward(self, x):
            found.append((private.tracing_state() is not None, private.is_transformed()))
            return x * 2

    Noted()(torch.ones(1))
    torch.jit.trace(Noted(), torch.ones(1), check_trace=False)
    torch.func.vmap(Noted())(torch.ones(1, 1))
    assert found == [(False, False), (True, False), (False, True)]


def test_a_constant_of_a_graph_is_not_traced():
    @private.constant_in_graphs
    def length(text):
        return len({text: eval(text)})  # a graph cannot have it

    def scaled(x):
        return x * length("2")

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).tolist() == [1]


def test_transforms_are_seen_within_an_autograd_function():
    found = []

    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            found.append(bool(private.has_transform()))
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    Twice.apply(torch.ones(1))
    torch.func.vmap(Twice.apply)(torch.ones(1, 1))
    assert found == [False, True]


def test_compiled_code_on_disk_has_a_tag(tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, hits = torch.ones(2, 2), []
    for tags in (["old"], ["old", "old"], ["new"], ["new"]):
        torch.compiler.reset()
        with torch.compiler.config.patch(cache_key_tag="of a user"):
            for tag in tags:
                private.tag_compiled_code(tag)
            assert torch.compiler.config.cache_key_tag == f"of a user {tag}"
            counters.clear()
            torch.compile(torch.mm, fullgraph=True)(x, x)
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0, 1]


def test_the_backward_pass_of_a_thread():
    found, ended = [], []
    x = torch.ones(2, requires_grad=True)

    def hook(grad):
        node = private.current_node()
        found.append((private.backward_id() >= 0, node.name().startswith("MulBackward")))
        private.engine.queue_callback(lambda: ended.append(len(found)))
        return grad

    number = private.next_node_number()
    y = x * 2
    assert y.grad_fn._sequence_nr() == number
    y.grad_fn.register_prehook(lambda grads: (hook(grads[0]),))
    y.sum().backward()
    assert found == [(True, True)]
    assert ended == [1]
    assert (private.backward_id(), private.current_node()) == (-1, None)


def test_checkpoints_set_hooks_of_saved_tensors():
    found = []

    def block(x):
        found.append(private.saved_tensor_hooks(True) is not None)
        return (x * 2).sin()

    block(torch.ones(1))
    checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert found == [False, True, True]


def test_wrappers_and_fake_tensors():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    plain = torch.ones(2)
    assert not private.is_wrapper(plain)
    assert private.is_wrapper(torch.Tensor._make_wrapper_subclass(Wrapper, (2,)))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert isinstance(mode.from_tensor(plain), private.FakeTensor)
        with private.disable_current_modes():
            assert type(torch.ones(2)) is torch.Tensor


def test_writes_are_counted_again_below_the_dispatch_of_a_subclass():
    t = torch.zeros(2)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as within __torch_dispatch__
        t.add_(1)
        assert t._version == 0
        with private.ExcludeDispatchKey(private.COUNTS_WRITES, False):
            t.add_(1)
    assert t._version == 1


def test_the_compiler_traces():
    found = []

    def backend(graph, inputs):
        found.append(private.is_compiler_tracing())
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert found == [True]
    assert not private.is_compiler_tracing()


def test_a_torch_without_cuda_has_no_streams():
    assert callable(private.raw_stream) or not torch.backends.cuda.is_built()


def test_subclasses_count_writes_without_torch_function():
    class Named(torch.Tensor):
        pass

    named = torch.zeros(2).as_subclass(Named)
    named.add_(1)
    with private.WithoutTorchFunction():
        assert type(named + 1) is torch.Tensor
        assert named._version == 1


def test_fsdp_assigns_to_parameters_itself():
    from torch.distributed.fsdp._fully_shard._fsdp_param import unsafe_setattr_param

    class Refusing(nn.Linear):
        def __setattr__(self, name, value):
            if "weight" in self.__dict__.get("_parameters", {}):
                raise AssertionError(name)
            super().__setattr__(name, value)

    layer, weight = Refusing(2, 2, bias=False), nn.Parameter(torch.ones(2, 2))
    let_fsdp_assign(layer)
    unsafe_setattr_param(layer, "weight", weight)
    assert layer.weight is weight
    with pytest.raises(AssertionError, match="weight"):
        layer.weight = weight
    with pytest.raises(AssertionError, match="weight"):
        layer.__setattr__("weight", weight)


def test_the_functional_collectives():
    names = {op.name() for op in private.collective_ops()}
    assert "_c10d_functional::all_to_all_single" in names
    assert len(names) == 4
