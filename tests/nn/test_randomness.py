"""Stochastic rounding in layers: where random bits must repeat, and where they must differ."""

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch.utils.checkpoint import checkpoint

M, K, N = 45, 70, 37  # no multiple of any block


def data():
    torch.manual_seed(0)
    return torch.randn(M, K, requires_grad=True), torch.randn(M, N)


def model(recipe="nvfp4", seed=0, **arguments):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(K, 64), torch.nn.GELU(), torch.nn.Linear(64, N))
    mf.quantize_(layers, recipe, seed=seed, **arguments)
    return layers


def gradients(layers, x, g, run=None):
    layers.zero_grad()
    x = x.detach().requires_grad_()
    (run or layers)(x).backward(g)
    return [x.grad, *(p.grad.clone() for p in layers.parameters())]


def all_equal(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b))


def test_same_seed_same_bytes_with_any_threads():
    x, g = data()
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            results.append(
                [mf.tensor.quantize(t, "nvfp4+sr", seed=4).codes for t in (x.detach(), g)]
            )
    finally:
        torch.set_num_threads(threads)
    assert all_equal(results[0], results[1])
    assert all_equal(results[0], results[2])
    assert all_equal(gradients(model(), x, g), gradients(model(), x, g))


def test_forwards_seeds_ranks_and_layers_draw_other_bits():
    x, g = data()
    layers = model()
    first, second = gradients(layers, x, g), gradients(layers, x, g)
    assert layers[0].rng_state.tensor[1] == 2
    assert not torch.equal(first[0], second[0])
    for other in (model(seed=1), model(data_parallel_rank=1)):
        assert not torch.equal(first[0], gradients(other, x, g)[0])
    assert layers[0].rng_state is layers[2].rng_state
    assert layers[0].stream.item() == ops.stream("0")
    assert layers[2].stream.item() == ops.stream("2")


def test_evaluation_does_not_advance_the_counter():
    layers = model("fprop=nvfp4+sr*nvfp4 dgrad=bf16*bf16 wgrad=bf16*bf16").eval()
    x = data()[0]
    assert torch.equal(layers(x), layers(x))
    layers.train()
    assert not torch.equal(layers(x), layers(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_the_bits(use_reentrant):
    recipe = "fprop=nvfp4+sr*nvfp4 dgrad=nvfp4+sr*nvfp4/16x16 wgrad=nvfp4+sr+rht*nvfp4+sr+rht"
    x, g = data()
    original, recomputed = model(recipe), model(recipe)

    class Block(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    block = Block(recomputed)  # the hook is the inner model's, which backward runs again
    assert all_equal(gradients(original, x, g), gradients(recomputed, x, g, run=block))
    assert recomputed[0].rng_state.tensor[1] == 1


def test_a_layer_of_its_own():
    layer = mf.Linear(K, N, recipe="nvfp4", name="head", seed=3)
    assert list(layer.state_dict()) == ["weight", "bias"]
    x, g = data()
    assert not all_equal(gradients(layer, x, g), gradients(layer, x, g))
    assert "recipe='nvfp4'" in repr(layer)
