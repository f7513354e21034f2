"""How long casts take beside one another on a CPU."""

import time

import minifloat as mf
import pytest
import torch

ROUNDS = 15
MOST = 6.0  # times the cast without the flag; 2 to 4 are measured


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("base", ["nvfp4", "nvfp4/16x16", "nvfp4+sr"])
def test_four_over_six_takes_at_most_six_times_its_base(base, columnwise):
    x = torch.randn(2048, 256, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {base: [], f"{base}+4over6": []}
    for _ in range(ROUNDS):
        for spec, seconds in times.items():
            start = time.process_time()  # other processes do not count in it
            mf.tensor.quantize(x, spec, columnwise=columnwise)
            seconds.append(time.process_time() - start)
    plain, chosen = (min(seconds) for seconds in times.values())  # the least disturbed rounds
    assert chosen <= MOST * plain, f"{1e3 * chosen:.2f} ms beside {1e3 * plain:.2f} ms"
