"""clip_gradients: torch's result, for parameters of several meshes or without gradients."""

import logging
import math

import pytest
import torch
from minifloat.train.job.processes import clip_gradients, quiet_gathers, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.worlds import run_world

GRADIENTS = {
    "above the limit": [[3.0, -4.0], [12.0, 0.0], [84.0, 0.0]],
    "below the limit": [[3e-3, -4e-3], [0.0, 1e-3], [0.0, 0.0]],
    "two have none": [[3.0, -4.0], None, None],
    "one has none": [None, [3.0, -4.0], [12.0, 84.0]],
    "none": [None, None, None],
    "infinite": [[math.inf, 1.0], [2.0, 3.0], [1.0, -math.inf]],
    "NaN": [[math.nan, 1.0], [2.0, 3.0], [1.0, 1.0]],
}


def with_gradient(gradient: list[float] | None, place=lambda t: t) -> nn.Parameter:
    parameter = nn.Parameter(place(torch.zeros(2)))
    parameter.grad = None if gradient is None else place(torch.tensor(gradient))
    return parameter


def require_torchs_result(found: list[nn.Parameter], gradients: list, limit: float = 1.0) -> None:
    alone = [with_gradient(gradient) for gradient in gradients]
    norm = torch.nn.utils.clip_grad_norm_(alone, limit)
    got = whole(clip_gradients(iter(found), limit))
    torch.testing.assert_close(got, norm, equal_nan=True)
    for a, b in zip(found, alone, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(whole(a.grad), b.grad, equal_nan=True)


@pytest.mark.parametrize("case", GRADIENTS)
def test_one_process(case):
    gradients = GRADIENTS[case]
    require_torchs_result([with_gradient(gradient) for gradient in gradients], gradients)


def test_no_parameters():
    assert clip_gradients([], 1.0).item() == 0


def check_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("group", "rank"))
    places = [
        lambda t: distribute_tensor(t, mesh, [Replicate(), Shard(0)]),
        lambda t: distribute_tensor(t, mesh["rank"], [Shard(0)]),
        lambda t: t.clone(),  # on all ranks
    ]
    for gradients in GRADIENTS.values():
        found = [with_gradient(g, place) for g, place in zip(gradients, places)]
        require_torchs_result(found, gradients)


def test_parameters_of_several_meshes():
    run_world(2, check_meshes)


def test_one_message_of_torch_is_dropped(caplog, monkeypatch):
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    monkeypatch.setattr(logger, "filters", [])
    caplog.set_level(logging.WARNING)
    logger.addHandler(caplog.handler)  # torch's loggers do not propagate
    try:
        quiet_gathers()
        logger.warning("While redistributing from %s", 1)
        logger.warning("Another message")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"Another message"}
