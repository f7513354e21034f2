"""The router: scores, groups, weights, balance and counts."""

import copy
import pickle

import minifloat as mf
import pytest
import torch
from minifloat.moe.router import Router
from torch.utils.checkpoint import checkpoint


def router(**changes) -> Router:
    arguments = {"dim": 16, "experts": 8, "top_k": 2} | changes
    torch.manual_seed(0)
    return Router(**arguments)


def tokens(count: int = 12, dim: int = 16) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("route_norm", [False, True])
def test_scores_and_weights_are_those_of_a_loop(score, route_norm):
    layer = router(score=score, route_norm=route_norm, route_scale=2.5, top_k=3)
    x = tokens()
    indices, weights = layer(x)
    logits = x.double() @ layer.weight.detach().double().T
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    for token in range(len(x)):
        chosen = sorted(range(8), key=lambda e: -scores[token, e])[:3]
        assert indices[token].tolist() == chosen
        expected = scores[token, chosen]
        if route_norm:
            expected = expected / expected.sum()
        # fp32 scores of 16 terms: a few units in the last place
        torch.testing.assert_close(weights[token].double(), expected * 2.5, rtol=1e-5, atol=0)
    assert weights.dtype == torch.float32
    assert indices.dtype == torch.int64


def test_computes_in_fp32_whatever_the_dtypes():
    layer = router().to(torch.bfloat16)
    x = tokens().bfloat16()
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = layer(x)
    in_fp32 = router()
    in_fp32.weight.data = layer.weight.data.float()
    for found in (under_autocast, in_fp32(x.float())):
        for a, b in zip(expected, found):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert layer.expert_bias.dtype == torch.float32


def test_gradients_are_those_of_fp32_and_x_is_saved_as_it_is():
    layer = router(route_norm=False)
    x = tokens().bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        indices, weights = layer(x)
    assert [t.dtype for t in saved if t.shape == x.shape] == [torch.bfloat16]
    g = torch.randn_like(weights)
    found = torch.autograd.grad(weights, (x, layer.weight), g)
    scores = (x.float() @ layer.weight.T).sigmoid().gather(1, indices)
    for a, b in zip(found, torch.autograd.grad(scores, (x, layer.weight), g)):
        assert a.dtype == b.dtype
        # the same products; a matrix library may sum them in another order
        torch.testing.assert_close(
            a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )


def test_experts_lie_in_the_chosen_groups():
    layer = router(experts=12, top_k=4, expert_groups=4, groups_chosen=2)
    x = tokens(50)
    indices, _ = layer(x)
    scores = (x @ layer.weight.detach().T).sigmoid()
    for token in range(50):
        ranks = [scores[token, g * 3 : g * 3 + 3].topk(2).values.sum().item() for g in range(4)]
        best = sorted(range(4), key=lambda g: -ranks[g])[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        expected = sorted(allowed, key=lambda e: -scores[token, e])[:4]
        assert indices[token].tolist() == expected


def test_bias_changes_the_choice_alone():
    layer = router(route_norm=False)
    x = tokens()
    layer.expert_bias[5] = 100
    indices, weights = layer(x)
    assert (indices[:, 0] == 5).all()
    scores = (x @ layer.weight.detach().T).sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, indices), rtol=1e-6, atol=0)


def test_bias_moves_against_the_load_error():
    layer = router(balance_speed=0.25)
    layer.expert_bias[:] = torch.tensor([9.0, 8, 7, 0, 0, 0, 0, 0])
    layer(tokens())
    assert layer.counts.tolist() == [12, 12, 0, 0, 0, 0, 0, 0]
    layer.end_step()
    assert layer.expert_bias.tolist() == [8.75, 7.75, 7.25] + [0.25] * 5
    assert layer.counts.tolist() == [0] * 8
    assert layer.step_counts.tolist() == [12, 12] + [0] * 6
    layer.counts.fill_(3)
    before = layer.expert_bias.clone()
    layer.end_step()
    assert torch.equal(layer.expert_bias, before)


def test_bias_evens_the_load():
    layer = router(balance_speed=0.02)
    layer.weight.data[0] += 1
    x = tokens(256) + 0.3

    def imbalance() -> float:
        layer(x)
        counts = layer.counts.clone()
        layer.end_step()
        return (counts.max() / counts.float().mean()).item()

    found = [imbalance() for _ in range(60)]
    assert found[0] > 2
    assert found[-1] < 1.3


def test_counts_training_alone():
    layer = router()
    layer.eval()(tokens())
    with torch.no_grad():
        layer.train()(tokens())
    assert layer.counts.sum() == 0
    layer(tokens())
    layer(tokens())
    assert layer.counts.sum() == 2 * 12 * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_counts_nothing_twice(use_reentrant):
    layer = router()
    x = tokens().requires_grad_()
    _, weights = checkpoint(layer, x, use_reentrant=use_reentrant)
    weights.square().sum().backward()
    assert layer.counts.sum() == 12 * 2


def test_no_tokens():
    for balance in ("bias", "loss"):
        layer = router(balance=balance)
        indices, weights = layer(tokens(0))
        (weights.sum() + mf.moe.balance_loss(layer)).backward()
        assert indices.shape == weights.shape == (0, 2)
        assert not layer.weight.grad.any()


def test_copies_and_moves_keep_the_state():
    layer = router()
    layer(tokens())
    layer.end_step()
    layer(tokens())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.float64)):
        assert torch.equal(other.counts, layer.counts)
        assert other.counts.dtype == torch.int64
        assert torch.equal(other.expert_bias, layer.expert_bias)
        assert other.expert_bias.dtype == torch.float32
    assert list(layer.state_dict()) == ["weight", "expert_bias"]
    with torch.device("meta"):
        meta = router()
    meta.to_empty(device="cpu")
    assert not meta.counts.any()
    assert not meta.expert_bias.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k: expected 1 to 8, got 9"),
        ({"score": "relu"}, "score: expected one of"),
        ({"balance": "entropy"}, "balance: expected one of"),
        ({"expert_groups": 4}, "expected both or neither"),
        ({"expert_groups": 3, "groups_chosen": 2}, "expected groups of one size"),
        ({"expert_groups": 8, "groups_chosen": 1}, "top_k experts in the chosen ones"),
        ({"route_scale": -1.0}, "route_scale: expected a finite number of at least 0"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        router(**changes)
