"""`minifloat doctor`: no check of --gpu fails where the others here pass; --model has each time."""

from __future__ import annotations

import pytest
from minifloat.doctor import gpu_checks
from minifloat.doctor.meter import Meter
from minifloat.doctor.model_sizes import ModelSizes
from minifloat.doctor.predict import Job, predict

pytestmark = pytest.mark.gpu


def test_no_check_fails(device):
    rows = list(gpu_checks.run_checks(device))
    assert len(rows) > 80
    assert not [row for row in rows if row[1]]


@pytest.mark.parametrize("experts", [0, 4])
def test_each_time_is_found(device, experts):
    each = {"experts": experts, "experts_per_token": 2, "expert_intermediate": 256}
    model = ModelSizes(256, 512, 2, 4, 2, 64, vocab=512, **each if experts else {})
    job = Job(model, tokens=256, seq=128, gpus=2)
    measured = Meter(device, seconds=0.01).measure(job, ["fp8_delayed", "mxfp8", "nvfp4"])
    for row in predict(job, measured):
        assert min(row.ms, row.gemms, row.attention, row.memory, row.link) > 0, row
        assert (row.casts > 0) == (row.recipe != "bf16"), row
        assert (row.host > 0) == (device.type == "cuda"), row
