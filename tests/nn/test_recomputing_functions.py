"""Autograd functions that run layers again in backward: each slice draws the bits it drew before.

Tiled MLPs, reversible blocks and torch's own checkpoint with use_reentrant=True are such functions.
The recipe rounds x stochastically, so that a forward with other bits has another output.
"""

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

RECIPE = "fprop=nvfp4+sr*nvfp4 dgrad=nvfp4+sr*nvfp4 wgrad=nvfp4+sr+rht*nvfp4+sr+rht"
ROWS, WIDTH = 16, 32


def run_in_slices(f, x, slices):
    with torch.no_grad():
        return torch.cat([f(part) for part in x.chunk(slices)])


def run_again(f, x, gy, slices):
    """Runs each slice of x with gradients, and its backward pass. Returns the gradient of x."""
    found = []
    for part, g in zip(x.detach().chunk(slices), gy.chunk(slices)):
        part = part.detach().requires_grad_()
        with torch.enable_grad():
            y = f(part)
        torch.autograd.backward(y, g)
        found.append(part.grad)
    return torch.cat(found)


class Tiled(torch.autograd.Function):
    """Its name has nothing of checkpoints."""

    @staticmethod
    def forward(ctx, f, slices, x, *parameters):
        ctx.f, ctx.slices, ctx.parameters = f, slices, len(parameters)
        ctx.save_for_backward(x)
        return run_in_slices(f, x, slices)

    @staticmethod
    def backward(ctx, gy):
        gx = run_again(ctx.f, ctx.saved_tensors[0], gy, ctx.slices)
        return None, None, gx, *[None] * ctx.parameters


class Decorated(Tiled):
    """The context is among the *args of a decorator."""

    forward = staticmethod(torch.amp.custom_fwd(Tiled.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Tiled.backward, device_type="cpu"))


class WithSetup(torch.autograd.Function):
    """Its forward has no context."""

    @staticmethod
    def forward(f, slices, x, *parameters):
        return run_in_slices(f, x, slices)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.f, ctx.slices, x, *parameters = inputs
        ctx.parameters = len(parameters)
        ctx.save_for_backward(x)

    backward = staticmethod(Tiled.backward)


class Mlp(nn.Module):
    """Keeps what it returned."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.outputs = []

    def forward(self, x):
        y = self.w2(torch.tanh(self.w1(x)))
        self.outputs.append(y.detach().clone())
        return y


class Nested(nn.Module):
    """Checkpoints its layers within the function, in one of torch's two ways."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = Mlp(), use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    @property
    def outputs(self):
        return self.inner.outputs


def converted(model):
    root = nn.Sequential(model, nn.Linear(WIDTH, WIDTH))
    mf.quantize_(root, RECIPE, keep="nothing")
    return root


def inputs(n):
    """Returns n inputs of equal slices: only random bits tell outputs apart."""
    torch.manual_seed(7)
    row = torch.randn(1, WIDTH)
    return [row.repeat(ROWS, 1).requires_grad_() for _ in range(n)]


def require_repeats(model, functions, slices, order, recomputations=1):
    """Runs forwards of a model in functions, then their backward passes in an order."""
    outputs, results, seen = [], [], []
    for x in inputs(len(order)):
        results.append(functions.apply(model, slices, x, *model.parameters()))
        seen.append(list(model.outputs))
        model.outputs.clear()
        outputs += seen[-1]
    for i, a in enumerate(outputs):
        assert not any(torch.equal(a, b) for b in outputs[:i])
    for i in order:
        results[i].sum().backward()
        again, want = list(model.outputs), seen[i]
        model.outputs.clear()
        assert len(again) == recomputations * slices
        for slice_, y in enumerate(want):
            for z in again[slice_ * recomputations : (slice_ + 1) * recomputations]:
                assert torch.equal(y, z), (i, slice_)


FUNCTIONS = [Tiled, Decorated, WithSetup]


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_slices_of_functions_in_flight(function, slices):
    root = converted(Mlp())
    for order in ((0, 1, 2), (2, 0, 1)):
        require_repeats(root[0], function, slices, order)
    assert mf.training_state(root)["rng"].tolist() == [0, 6 * slices]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_within_a_function(use_reentrant):
    root = converted(Nested(use_reentrant))
    with set_checkpoint_early_stop(False):  # else it ends before the output is kept
        require_repeats(root[0], Tiled, 4, (1, 0), recomputations=2)
    assert mf.training_state(root)["rng"].tolist() == [0, 8]


def test_layers_that_a_function_calls_by_themselves():
    root = converted(Mlp())
    layer, model = root[0].w1, root[0]

    def first_layer(x):
        y = layer(x)[:, :WIDTH]
        model.outputs.append(y.detach().clone())
        return y

    first_layer.outputs, first_layer.parameters = model.outputs, model.parameters
    require_repeats(first_layer, Tiled, 4, (1, 0))


def test_gradients_are_those_without_the_function():
    got = []
    for is_tiled in (False, True):
        torch.manual_seed(0)
        root = converted(Mlp())
        (x,) = inputs(1)
        mlp, parameters = root[0], list(root[0].parameters())
        y = Tiled.apply(mlp, 1, x, *parameters) if is_tiled else mlp(x)
        root[1](y).square().mean().backward()
        got.append([x.grad, *(p.grad for p in root.parameters())])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a, b)


def test_a_backward_pass_that_runs_twice_repeats_twice():
    root = converted(Mlp())
    (x,) = inputs(1)
    y = Tiled.apply(root[0], 4, x, *root[0].parameters()).sum()
    for keeps in (True, False):
        y.backward(retain_graph=keeps)
    first, *again = (root[0].outputs[i : i + 4] for i in (0, 4, 8))
    for outputs in again:
        for a, b in zip(first, outputs, strict=True):
            assert torch.equal(a, b)
    assert not root[0].w1.rng_state.replays.of_functions


def test_a_function_of_more_slices_than_are_recorded():
    root = converted(Mlp())
    x = torch.randn(300, WIDTH, requires_grad=True)
    y = Tiled.apply(root[0], 300, x, *root[0].parameters()).sum()
    with pytest.raises(RuntimeError, match="expected at most 256 forwards of one layer"):
        y.backward()


def test_a_router_counts_tokens_of_a_function_once():
    counts = []
    for name in (None, Tiled):
        moe = mf.MoE(WIDTH, WIDTH, experts=4, top_k=1, recipe="mxfp8")
        (x,) = inputs(1)
        y = moe(x) if name is None else name.apply(moe, 4, x, *moe.parameters())
        y.sum().backward()
        counts.append(int(moe.router.counts.sum()))
    assert counts == [ROWS, ROWS]


@pytest.mark.parametrize("make", [lambda: nn.Linear(WIDTH, WIDTH), Mlp])
def test_a_forward_that_nothing_can_follow_changes_no_state(make):
    """Runs forwards in training mode without gradients, as the search for shapes does."""
    root = converted(make())
    with torch.no_grad():
        root(torch.zeros(ROWS, WIDTH))
        root[1](torch.zeros(ROWS, WIDTH))
    assert mf.training_state(root)["rng"].tolist() == [0, 0]
    root(torch.zeros(ROWS, WIDTH))
    assert mf.training_state(root)["rng"].tolist() == [0, 1]


@pytest.mark.parametrize("function", [None, Tiled, Decorated])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_function_that_has_no_backward_changes_no_state(function, needs_grad, is_enabled):
    """Its inputs need no gradient, or no_grad is around it: None is torch's own checkpoint."""
    root = converted(Mlp())
    x = inputs(1)[0].detach().requires_grad_(needs_grad)
    with torch.no_grad():
        want = root[0](x)
    with torch.set_grad_enabled(is_enabled):
        if function is None:
            y = checkpoint(root[0], x, use_reentrant=True)
        else:
            y = function.apply(root[0], 1, x)
    has_backward = needs_grad and is_enabled
    assert y.requires_grad == has_backward
    assert torch.equal(y, want) == (not has_backward)  # which draws new bits
    assert mf.training_state(root)["rng"].tolist() == [0, int(has_backward)]
