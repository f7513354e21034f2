"""The Llama of `minifloat train`, its schedule and its measurements."""

import math

import pytest
import torch
from minifloat.train.config import ModelConfig, TrainConfig
from minifloat.train.job.run import learning_rate
from minifloat.train.model.llama import build_model, cross_entropy, rotary_table, rotate
from minifloat.train.model.measure import (
    PeakMemory,
    SpeedOfLight,
    loss_in_product_dtype,
    product_dtype,
    saved_bytes_per_token,
)

SIZES = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=300)


@pytest.fixture
def model():
    return build_model(SIZES, seq=16, seed=1, device="cpu")


def test_module_names_are_those_of_llama_checkpoints(model):
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    block = [f"attention.{w}" for w in ("wq", "wk", "wv", "wo")]
    block += [f"feed_forward.{w}" for w in ("w1", "w2", "w3")]
    assert linears == [f"layers.{i}.{name}" for i in range(2) for name in block] + ["output"]
    assert model.layers[0].attention.wk.weight.shape == (16, 32)
    assert "rotary" not in model.state_dict()


def test_a_token_sees_nothing_after_it(model):
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 300
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
    assert not before[:, 9:].equal(after[:, 9:])


def test_initial_weights_are_a_function_of_the_seed(model):
    torch.manual_seed(99)
    same = build_model(SIZES, seq=8, seed=1, device="cpu").state_dict()
    other = build_model(SIZES, seq=8, seed=2, device="cpu").state_dict()
    for name, value in model.state_dict().items():
        assert value.equal(same[name])
        assert value.equal(other[name]) == name.endswith("norm.weight")


def test_an_untrained_model_knows_nothing(model):
    ids = torch.randint(0, 300, (4, 17), generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:])
    assert abs(loss.item() - math.log(300)) < 0.6  # logits of variance 1 add about 0.5


def test_rotation_keeps_lengths_and_sees_distances_only():
    table = rotary_table(32, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    x = rotate(q.expand(1, 32, 1, 8), table)
    y = rotate(k.expand(1, 32, 1, 8), table)
    torch.testing.assert_close(x.norm(dim=-1), q.norm(dim=-1).expand(1, 32, 1))
    scores = x[0, :, 0] @ y[0, :, 0].t()
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=1e-4, atol=1e-4)


def test_autocast_rounds_the_norms_output_once(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert model.norm(torch.randn(2, 32)).dtype == torch.bfloat16
    assert model.norm(torch.randn(2, 32)).dtype == torch.float32


def test_saved_bytes_of_the_linears_that_no_recipe_converts(model):
    """Counts the inputs of linears, in the products' dtype; wq, wk, wv share one, w1, w3 too."""
    config = TrainConfig(model=SIZES, seq=16, batch=2)
    saved = saved_bytes_per_token(model, config, loss_in_product_dtype(model, "cpu"))
    block = 32 + 32 + 32 + 64  # the inputs of wq wk wv; wo; w1 w3; w2
    assert saved.linears == product_dtype("cpu").itemsize * (2 * block + 32)
    assert saved.total > saved.linears


def test_the_speed_of_light_counts_every_product():
    config = TrainConfig(model=SIZES, seq=16, batch=2)
    light = SpeedOfLight(config)
    light.measure()
    weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64) + 32 * 300
    attention = 2 * 2 * 16 * 32  # a token: 2 layers, 2 products, S E H operations, causal half
    assert light.flops == 3 * 32 * (2 * weights + attention)
    assert light.seconds > 0


def test_the_learning_rate_rises_falls_and_ends_at_a_tenth():
    config = TrainConfig(steps=100, warmup=10, lr=1.0)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(1, TrainConfig(steps=1)) > 0


def test_peak_memory_sees_what_was_held_for_a_moment():
    memory = PeakMemory("cpu")
    held = torch.ones(16, 2**20)
    del held
    assert memory.bytes() > 48e6  # 64 MB were touched; the rest of the process may shrink
