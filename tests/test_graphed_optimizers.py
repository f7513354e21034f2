"""The optimizers of mf.GraphedStep, on a CPU: rates that they read from tensors, and refusals.

A device makes GraphedOptimizers write rates to tensors there, so a CPU does as a GPU.
"""

import pytest
import torch
from minifloat.graphed_optimizers import GraphedOptimizers
from torch import nn

from tests.support.same_bits import require_same

CPU = torch.device("cpu")
RATES = (2.0**-7, torch.tensor(2.0**-5), 2.0**-9)  # exact in float32


class Job:
    """Three weights in groups with rates of their own, a number or a tensor, in two optimizers."""

    def __init__(self):
        self.weights = [nn.Parameter(torch.arange(4.0) + i) for i in range(3)]
        rates = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in RATES]
        groups = [{"params": [w], "lr": rate} for w, rate in zip(self.weights, rates)]
        options = {"fused": True, "capturable": True}
        self.optimizers = [
            torch.optim.AdamW(groups[:2], **options),
            torch.optim.AdamW(groups[2:], **options),
        ]
        schedule = torch.optim.lr_scheduler.LambdaLR
        self.schedulers = [schedule(each, lambda i: 2.0**-i) for each in self.optimizers]
        self.groups = [group for each in self.optimizers for group in each.param_groups]

    def step(self):
        sum(w.square().sum() for w in self.weights).backward()
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def schedule(self):
        for each in self.schedulers:
            each.step()


def test_each_group_has_its_rate():
    plain, job = Job(), Job()
    graphed = GraphedOptimizers(job.optimizers, CPU)
    for _ in range(3):
        plain.step()
        plain.schedule()
        before = [group["lr"] for group in job.groups]
        graphed.write_rates()
        with graphed.rates_in_place():
            ours = [group["lr"] for group in job.groups]
            job.step()
        assert [group["lr"] is rate for group, rate in zip(job.groups, before)] == [True] * 3
        job.schedule()
    graphed.write_rates()
    for i, (weight, want) in enumerate(zip(job.weights, plain.weights)):
        require_same(weight, want, f"weight {i}")
        require_same(ours[i], torch.as_tensor(plain.groups[i]["lr"]), f"rate {i}")


def test_a_group_without_a_rate_keeps_none():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]}], fused=True)
    optimizer.param_groups[0]["lr"] = None  # as optimizers that find their own have it
    graphed = GraphedOptimizers(optimizer, CPU)
    graphed.write_rates()
    with graphed.rates_in_place():
        assert optimizer.param_groups[0]["lr"] is None


def test_an_error_within_gives_rates_back():
    job = Job()
    graphed = GraphedOptimizers(job.optimizers, CPU)
    before = [group["lr"] for group in job.groups]
    with pytest.raises(KeyError), graphed.rates_in_place():
        raise KeyError
    assert all(group["lr"] is rate for group, rate in zip(job.groups, before))


@pytest.mark.parametrize("device", [CPU, None], ids=["captured", "watched"])
@pytest.mark.parametrize("rate", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
def test_a_scheduler_within_the_step_is_refused(device, rate):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    graphed = GraphedOptimizers(optimizer, device)
    optimizer.step()
    says = r"scheduler\.step\(\) between calls"
    with pytest.raises(ValueError, match=says), graphed.rates_in_place():
        scheduler.step()


@pytest.mark.parametrize(
    ("kind", "option"), [(torch.optim.AdamW, "capturable"), (torch.optim.SGD, "fused")]
)
def test_optimizers_that_a_graph_would_freeze_are_refused(kind, option):
    optimizer = kind([nn.Parameter(torch.ones(1))], lr=1e-3)
    with pytest.raises(ValueError, match=f"got one with {option}=.*; make it with {option}=True"):
        GraphedOptimizers(optimizer, CPU)
    GraphedOptimizers(optimizer, None)  # no step is captured


def test_what_is_no_optimizer_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, .*got NoneType"):
        GraphedOptimizers([optimizer, None], None)


def test_settings_are_those_of_the_capture():
    job = Job()
    graphed = GraphedOptimizers(job.optimizers, CPU)
    job.step()
    graphed.keep_settings()
    job.schedule()
    job.step()
    graphed.require_settings()
    job.groups[1]["betas"], betas = (0.8, 0.9), job.groups[1]["betas"]
    says = r"expected param_groups\[1\]\['betas'\]=\(0\.9, 0\.999\), .*got \(0\.8, 0\.9\)"
    with pytest.raises(ValueError, match=says):
        graphed.require_settings()
    job.groups[1]["betas"] = betas
    graphed.require_settings()
    job.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"expected len\(param_groups\)=3, .*got 4"):
        graphed.require_settings()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda weights: weights.append(nn.Parameter(torch.ones(1))), "2"),
        (lambda weights: weights.clear(), "0"),
        (lambda weights: weights.insert(0, nn.Parameter(weights.pop().detach())), "others"),
    ],
    ids=["appended", "removed", "replaced"],
)
def test_parameters_are_those_of_the_capture(change, got):
    job = Job()
    graphed = GraphedOptimizers(job.optimizers, CPU)
    job.step()
    graphed.keep_settings()
    job.groups[2]["params"] = [*job.groups[2]["params"]]
    graphed.require_settings()
    change(job.groups[2]["params"])
    says = rf"expected the 1 parameters that param_groups\[2\] had at the capture, got {got}: "
    with pytest.raises(ValueError, match=says):
        graphed.require_settings()


def test_a_state_that_is_loaded_is_refused():
    job = Job()
    graphed = GraphedOptimizers(job.optimizers, CPU)
    graphed.keep_settings()
    job.optimizers[1].load_state_dict(job.optimizers[1].state_dict())
    with pytest.raises(ValueError, match="make a new GraphedStep after loading"):
        graphed.require_settings()
