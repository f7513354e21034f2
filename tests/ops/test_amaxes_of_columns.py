"""amaxes_of_columns of quantize: a rowwise cast also finds what a columnwise one scales by."""

import minifloat as mf
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..support.experts import routing, tensors
from ..support.same_bits import require_same

ops = torch.ops.minifloat
EIGHT = ("codes", "scale", "amax", "decoded") * 2


@pytest.mark.parametrize("spec", ["e4m3/row", "e4m3/row+exact", "e4m3/row+sr"])
@pytest.mark.parametrize("shape", [(40, 72), (3, 33, 47), (0, 16), (16, 0), (2, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_a_columnwise_cast(spec, shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    if x.numel():
        x.view(-1)[0], x.view(-1)[1] = torch.nan, -torch.inf
    rng = torch.tensor([1, 2])
    both = ops.quantize(x, spec, spec, rng=rng)
    got = ops.quantize(x, spec, "", rng=rng, amaxes_of_columns=True)
    later = ops.quantize(x, "", spec, rng=rng, amax_col=got[6])
    for name, a, b in zip(EIGHT, (*got[:4], *later[4:6], got[6]), both):
        require_same(a, b, name)
    assert got[4].numel() == got[5].numel() == got[7].numel() == 0


@pytest.mark.parametrize(
    ("row", "col"),
    [("mxfp8", ""), ("e4m3/row+rht", ""), ("e4m3/row", "e4m3/row"), ("", "e4m3/row")],
)
def test_other_casts_are_refused(row, col):
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="expected amaxes_of_columns of values"):
            ops.quantize(torch.ones(16, 16, device=device), row, col, amaxes_of_columns=True)


def test_a_group_has_its_own():
    x = torch.randn(20, 16)
    table = ops.group_table(torch.tensor([4, 4, 16], dtype=torch.int32), 20)
    found = ops.quantize(x, "e4m3/row", "", groups=table, amaxes_of_columns=True)[6]
    require_same(found, ops.quantize(x, "", "e4m3/row", groups=table)[6])
    assert torch.equal(found[1], torch.zeros(16))


class Casts(TorchDispatchMode):
    """Casts of matrices of one width: specs, whether columns' amaxes are found, and those given."""

    def __init__(self, width):
        super().__init__()
        self.width, self.found = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ops.quantize.default and args[0].shape[-1] == self.width:
            named = dict(zip((a.name for a in func._schema.arguments), args)) | kwargs
            finds = named.get("amaxes_of_columns", False)
            self.found.append((named["row"], named["col"], finds, named.get("amax_col")))
        return func(*args, **kwargs)


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_rowwise_gw_hp"])
def test_a_weight_that_backward_casts_is_read_for_its_amaxes_once(recipe):
    layer = mf.Linear(64, 48, recipe=recipe)
    layer.recompute = "weight"
    x = torch.randn(32, 64, requires_grad=True)
    with Casts(64) as seen:
        layer(x).sum().backward()
    of_weight = [cast for cast in seen.found if cast[2] or cast[3] is not None]
    assert [cast[:3] for cast in of_weight] == [("e4m3/row", "", True), ("", "e4m3/row", False)]
    assert torch.equal(of_weight[1][3], layer.weight.detach().abs().amax(0))


def test_transposed_experts_are_cast_by_rows_in_backward():
    """Their rows are not adjacent: backward casts the transpose, whose rows' amaxes it finds."""
    t = tensors(40, 64, 48, 4, torch.bfloat16)
    w13, w2 = (t[name].mT.contiguous().mT for name in ("w13", "w2"))
    with Casts(64) as seen:
        mf.grouped_mlp(t["x"], w13, w2, *routing(40, 2, 4), "fp8_rowwise").sum().backward()
    assert seen.found
    assert not any(finds or given is not None for *_, finds, given in seen.found)
