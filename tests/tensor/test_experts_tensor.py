"""QuantizedTensor of experts' weights (E, N, K): each matrix as a QuantizedTensor of its own."""

import copy
import pickle

import minifloat as mf
import pytest
import torch

from tests.support.same_bits import require_same_weight

SPECS = [
    ("e4m3/tensor", "e4m3/tensor"), ("e4m3/row", "e4m3/row"), ("e4m3/128x128", "e4m3/128x128"),
    ("mxfp8", "mxfp8"), ("nvfp4/16x16", "nvfp4/16x16"), ("mxfp4", "nvfp4"), ("mxfp8", None),
    (None, "nvfp4"),
]  # fmt: skip
E, N, K = 3, 160, 256


def drawn():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(E, N, K, generator=generator) * torch.tensor([1.0, 8.0, 0.1]).view(E, 1, 1)


@pytest.mark.parametrize("specs", SPECS)
def test_each_expert_is_a_matrix_of_its_own(specs):
    w = drawn()
    q = mf.QuantizedTensor.from_tensor(w, *specs)
    assert q.shape == w.shape
    for e in range(E):
        alone = mf.QuantizedTensor.from_tensor(w[e], *specs)
        part = q.split(1)[e]
        assert torch.equal(part.dequantize()[0], alone.dequantize())
        assert torch.equal(q.dequantize()[e], alone.dequantize())
    for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.clone()):
        require_same_weight(twin, q)
    require_same_weight(q[1:3].clone(), mf.QuantizedTensor.from_tensor(w[1:3], *specs))
    other = mf.QuantizedTensor.from_tensor(torch.zeros_like(w), *specs)
    other.copy_(w)
    require_same_weight(other, q)


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16"])
def test_directions_of_2d_blocks_are_transposes(spec):
    q = mf.QuantizedTensor.from_tensor(drawn(), spec)
    q.update_usage(columnwise=True)
    require_same_weight(q, mf.QuantizedTensor.from_tensor(drawn(), spec, spec))


def test_slices_within_matrices():
    w = drawn()
    q = mf.QuantizedTensor.from_tensor(w, "mxfp8", "mxfp8")
    for dim in (1, 2):
        cut = q.narrow(dim, 32, 64)
        require_same_weight(
            cut,
            mf.QuantizedTensor.from_tensor(w.narrow(dim, 32, 64).contiguous(), "mxfp8", "mxfp8"),
        )
    with pytest.raises(ValueError, match="multiples of its block"):
        q.narrow(2, 16, 64)


def test_parts_must_fit():
    q = mf.QuantizedTensor.from_tensor(drawn(), "mxfp8")
    with pytest.raises(ValueError, match="expected scale of mxfp8, 3 x 160 x 256"):
        mf.QuantizedTensor(
            mf.tensor.Quantized(
                q.rowwise.codes, q.rowwise.scale[:2], q.rowwise.amax, "mxfp8", (E, N, K)
            ),
            None,
        )
    with pytest.raises(ValueError, match="got 4 dimensions"):
        mf.QuantizedTensor.from_tensor(torch.zeros(2, 3, 16, 16), "mxfp8")
