"""The pure ops on DTensors of any placement: the results of the same ops on whole tensors."""

import pytest
import torch
import torch.distributed as dist
from minifloat._native import ops
from minifloat.distributed.tensor_parallel import dtensor  # noqa: F401  registers the rules
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.same_bits import same_bytes
from tests.support.whole_layers import values
from tests.support.worlds import run_world


def check_rules(rank):
    """Compares each op on every placement with the op on the whole; counts sharded results."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x = values(1, 256, 512)
    sharded = 0
    for spec in (
        "e4m3/tensor",
        "e4m3/row",
        "e4m3/128x128",
        "mxfp8",
        "nvfp4",
        "nvfp4/16x16",
        "nvfp4+rht",
    ):
        for columnwise in (False, True):
            has_amax = spec[:5] == "nvfp4" or spec in ("e4m3/tensor", "e4m3/row")
            amax = ops.amax(x, spec, columnwise) if has_amax else None
            specs = ("", spec) if columnwise else (spec, "")
            for placement in (Replicate(), Shard(0), Shard(1)):
                where = (spec, columnwise, placement)
                d = distribute_tensor(x, mesh, [placement])
                if has_amax:
                    got = ops.amax(d, spec, columnwise).full_tensor()
                    assert same_bytes(got, amax), where
                for passed in (None, amax):
                    name = "amax_col" if columnwise else "amax_row"
                    whole = ops.quantize(x, *specs, **{name: passed})
                    is_of_rows = spec == "e4m3/row" and placement == Shard(int(columnwise))
                    at = Shard(0) if is_of_rows else Replicate()
                    d_amax = None if passed is None else distribute_tensor(passed, mesh, [at])
                    out = ops.quantize(d, *specs, **{name: d_amax})
                    for a, b in zip(out, whole):
                        assert same_bytes(a.full_tensor(), b), where
                    first = 4 if columnwise else 0
                    sharded += out[first].placements != (Replicate(),)
                    values_ = ops.dequantize(*out[first : first + 3], spec, x.shape[not columnwise])
                    want = ops.dequantize(*whole[first : first + 3], spec, x.shape[not columnwise])
                    assert same_bytes(values_.full_tensor(), want), where
                got = ops.hadamard(d, 16, columnwise)
                assert same_bytes(got.full_tensor(), ops.hadamard(x, 16, columnwise)), where
    assert sharded > 30, sharded
    check_whole_rules(mesh, x)
    check_grouped_rules(mesh, x)


def check_whole_rules(mesh, x):
    """Checks casts that need the whole tensor: stochastic, delayed, with an origin, decoded too.

    Their results equal those of the whole tensor, and amaxes with a wrong placement are refused.
    """
    d, rng = distribute_tensor(x, mesh, [Shard(0)]), torch.tensor([1, 2])
    amax = torch.tensor(3.0)
    d_rng, d_amax = (distribute_tensor(t, mesh, [Replicate()]) for t in (rng, amax))
    for spec, whole, sharded in (
        ("mxfp8+sr", {"rng": rng}, {"rng": d_rng}),
        ("mxfp8+sr", {"rng": rng, "origin": [16, 32]}, {"rng": d_rng, "origin": [16, 32]}),
        ("e4m3/tensor+delayed", {"amax_row": amax}, {"amax_row": d_amax}),
        ("mxfp8", {"origin": [16, 32]}, {"origin": [16, 32]}),
        ("mxfp8", {"decoded_row": True}, {"decoded_row": True}),
        ("mxfp4", {"fp8_row": True}, {"fp8_row": True}),
        ("nvfp4+eden", {"rng": rng}, {"rng": d_rng}),
    ):
        for a, b in zip(ops.quantize(d, spec, "", **sharded), ops.quantize(x, spec, "", **whole)):
            assert same_bytes(a.full_tensor(), b), (spec, sharded)
    drawn = ops.amax(d, "nvfp4+eden", rng=d_rng, stream=3)
    assert same_bytes(drawn.full_tensor(), ops.amax(x, "nvfp4+eden", rng=rng, stream=3))
    misplaced = distribute_tensor(ops.amax(x, "e4m3/row", True), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="expected amaxes and rng as Replicate"):
        ops.quantize(d, "e4m3/row", "e4m3/row", amax_col=misplaced)


def check_grouped_rules(mesh, x):
    """Checks that ops with groups, whose table counts rows of the whole, are computed whole."""
    d, offs = distribute_tensor(x, mesh, [Shard(0)]), torch.tensor([64, 64, 256]).int()
    table = ops.group_table(offs, 256)
    groups = distribute_tensor(table, mesh, [Replicate()])
    for spec in ("nvfp4", "e4m3/row"):
        whole = ops.quantize(x, spec, "", groups=table)
        sharded = ops.quantize(d, spec, "", groups=groups)
        for a, b in zip(sharded, whole):
            assert same_bytes(a.full_tensor(), b), spec
        values_ = ops.dequantize(*sharded[:3], spec, 512, groups=groups)
        want = ops.dequantize(*whole[:3], spec, 512, groups=table)
        assert same_bytes(values_.full_tensor(), want), spec
        amax = ops.amax(d, spec, groups=groups)
        assert same_bytes(amax.full_tensor(), ops.amax(x, spec, groups=table)), spec
    transformed = ops.hadamard(d, 16, groups=groups)
    assert same_bytes(transformed.full_tensor(), ops.hadamard(x, 16, groups=table))
    misplaced = distribute_tensor(table, mesh, [Shard(0)])
    for call in (
        lambda: ops.quantize(d, "mxfp8", "", groups=misplaced),
        lambda: ops.amax(d, "nvfp4", groups=misplaced),
        lambda: ops.hadamard(d, groups=misplaced),
    ):
        with pytest.raises(RuntimeError, match=r"expected .* as Replicate\(\)"):
            call()


def test_pure_ops():
    run_world(2, check_rules)
