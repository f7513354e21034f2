"""NVFP4's factors as amaxes: the values that other libraries compute, but for ties."""

import minifloat as mf
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from minifloat.serving.codes import global_scale
from minifloat.serving.read_codes import NUMERATORS, nvfp4_amax
from minifloat.serving.schemes import COMPRESSED_TENSORS, MODELOPT

from tests.serving.test_load_errors import build, tensors, write
from tests.support import quantized_checkpoints as checkpoints

COUNT = 150
SCALES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
CODES = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)


def values_of(spec: str, amax: float) -> torch.Tensor:
    codes, scale = CODES.repeat(len(SCALES), 1), SCALES.contiguous()
    q = mf.tensor.Quantized(codes, scale, torch.tensor(amax), spec, (len(SCALES), 16))
    return q.dequantize(torch.bfloat16)


def compressed_tensors(factor: torch.Tensor) -> torch.Tensor:
    scheme = checkpoints.scheme_of("NVFP4A16")
    packed = {"weight_packed": CODES.repeat(len(SCALES), 1), "weight_scale": SCALES}
    packed["weight_global_scale"] = factor.reshape(1)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    return compressor.decompress(packed, scheme)["weight"]


def modelopt(factor: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return (torch.cat((magnitudes, -magnitudes)) * (SCALES.float() * factor)).bfloat16()


@pytest.mark.parametrize("numerator", NUMERATORS.values())
@pytest.mark.parametrize("divides", [True, False])
def test_values_are_those_of_the_factor_but_for_ties(numerator, divides):
    """At a tie both values are a rounding of the same number, so they are next to each other."""
    generator = torch.Generator().manual_seed(0)
    exact = 0
    for _ in range(COUNT):
        amax = torch.randn((), generator=generator).abs().bfloat16().float()
        factor = numerator / amax if divides else amax / numerator
        found = {s: nvfp4_amax(s, factor.item(), divides) for s in NUMERATORS}
        spec = min(found, key=lambda s: found[s].ties)
        ours = values_of(spec, found[spec].value)
        theirs = (compressed_tensors if divides else modelopt)(factor)
        differing = (ours != theirs).sum().item()
        assert differing == found[spec].ties
        exact += differing == 0
        steps = ours.view(torch.int16).int() - theirs.view(torch.int16).int()
        assert steps.abs().max() <= 1
    least = {2688.0: 0.97, 1536.0: 0.85}[numerator]
    assert exact >= least * COUNT


@pytest.mark.parametrize("spec", NUMERATORS)
@pytest.mark.parametrize("divides", [True, False])
def test_an_exported_factor_is_exported_again(spec, divides):
    """But where another amax has more of the values that its own library computes."""
    generator = torch.Generator().manual_seed(0)
    form = COMPRESSED_TENSORS if divides else MODELOPT
    same = 0
    for _ in range(COUNT):
        amax = torch.randn((), generator=generator).abs().bfloat16().float()
        (factor,) = global_scale("weight", spec, amax, form).values()
        found = nvfp4_amax(spec, factor.item(), divides)
        theirs = (compressed_tensors if divides else modelopt)(factor)
        if (values_of(spec, amax.item()) != theirs).sum() == found.ties:
            (again,) = global_scale("weight", spec, torch.tensor(found.value), form).values()
            assert torch.equal(again, factor)
            same += 1
    assert same >= 0.9 * COUNT


def test_ties_are_reported_and_factors_out_of_range_refused(tmp_path):
    generator, factor = torch.Generator().manual_seed(0), None
    while factor is None or min(nvfp4_amax(s, factor, True).ties for s in NUMERATORS) == 0:
        factor = (1536 / torch.randn((), generator=generator).abs().bfloat16().float()).item()
    given = tensors()
    write(tmp_path, given | {"2.weight_global_scale": torch.tensor([factor])})
    report = mf.load_quantized_(build(), tmp_path)
    (note,) = [text for _, text in report.notes]
    assert note.startswith("1 layers have values halfway between two of bfloat16")
    assert note.endswith("such as 2")
    write(tmp_path, given | {"2.weight_global_scale": torch.tensor([1e-37])})
    with pytest.raises(ValueError, match="2: expected factors within the range of 2688 / amax"):
        mf.load_quantized_(build(), tmp_path)
