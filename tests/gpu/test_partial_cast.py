"""Partial casts of many weights at once: the CPU's bytes, for every format, cut and place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor

from tests.gpu.sweep import values
from tests.support.same_bits import on_cpu, require_same

pytestmark = pytest.mark.gpu

SPECS = [
    *("e4m3/tensor", "e5m2/tensor", "e4m3/row", "e4m3/row+exact", "e4m3/1x128", "e4m3/128x128"),
    *("mxfp8", "mxfp8/e5m2", "mxfp8+floor", "mxfp8/32x32", "mxfp4", "nvfp4", "nvfp4/16x16"),
    *("nvfp4+up", "nvfp4/16x16+pow2", "e4m3/tensor+delayed"),
    *("e1m2/1x16", "e1m2/16x16+pow2", "e1m2/1x32"),
]
SHAPES = [(1, 1), (16, 16), (33, 70), (128, 128), (130, 257), (300, 144), (512, 384), (700, 1)]
# Rowwise and columnwise, cast from one read of their master.
PAIRS = [
    *(("mxfp8", "mxfp8"), ("mxfp8+floor", "mxfp8/e5m2"), ("mxfp8/e5m2", "mxfp8/e5m2")),
    *(("mxfp8", "nvfp4/16x16"), ("nvfp4/16x16", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")),
    *(("nvfp4+up", "mxfp8/e5m2"), ("mxfp8/e5m2", "nvfp4/16x16+pow2"), ("mxfp8/32x32", "mxfp8")),
    *(("e4m3/row", "e4m3/row"), ("e4m3/1x128", "e4m3/1x128"), ("e4m3/tensor", "e5m2/tensor")),
    *(("e4m3/128x128", "e4m3/row+exact"), ("e4m3/tensor+delayed", "mxfp8")),
    *(("e1m2/1x16", "e1m2/1x16"), ("e1m2/1x32", "e1m2/1x16+pow2"), ("mxfp8", "e1m2/16x16")),
]
PAIR_SHAPES = [(256, 512), (320, 416), (300, 100), (129, 257), (200, 18), (1, 40), (48, 1)]
KINDS = ["normal", "wide", "tiny", "huge", "sparse", "zeros", "special"]
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


@dataclass
class Shards:
    """The lists of a cast, with one entry for each direction of a weight.

    geometry: columnwise, rows, cols, whether the weight is bf16, the shard's first element, whether
    codes are the shard's fragment of the flat codes.
    """

    masters: list[Tensor] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    geometry: list[int] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    amax: list[Tensor] = field(default_factory=list)

    def to(self, device: torch.device) -> Shards:
        moved: dict[int, Tensor] = {}  # a master that two directions share is shared there, too

        def move(tensors: list[Tensor]) -> list[Tensor]:
            for t in tensors:
                if id(t) not in moved:
                    moved[id(t)] = t.to(device, copy=True)
            return [moved[id(t)] for t in tensors]

        lists = {name: move(getattr(self, name)) for name in ("masters", "codes", "scales", "amax")}
        return replace(self, **lists)

    def outputs(self) -> dict[str, Tensor]:
        return {
            f"{name} of {spec}, {self.geometry[6 * i : 6 * i + 6]}": getattr(self, name)[i]
            for i, spec in enumerate(self.specs)
            for name in ("codes", "scales", "amax")
        }

    def run(self) -> None:
        """Casts all, in one list where codes go to flat codes and in one where to fragments."""
        native = torch.classes.minifloat
        for is_fragment in (False, True):
            chosen = [i for i in range(len(self.specs)) if self.geometry[6 * i + 5] == is_fragment]
            if not chosen:
                continue
            casts = [
                native.ShardCast(self.specs[i], *self.geometry[6 * i : 6 * i + 4]) for i in chosen
            ]
            owners, names = list(range(len(chosen))), list(map(str, chosen))
            codes, scales, amax, masters = (
                [tensors[i] for i in chosen]
                for tensors in (self.codes, self.scales, self.amax, self.masters)
            )
            lists = (owners, names, codes, scales, amax)
            starts = [self.geometry[6 * i + 4] for i in chosen]
            ready = native.MasterCasts(casts, *lists).check(
                masters, starts, codes if is_fragment else []
            )
            ready.run("", native.Agreement())


def add_shard(
    shards: Shards,
    spec: str,
    columnwise: bool,
    master: Tensor,
    dtype: torch.dtype,
    cut: tuple[int, int],
    is_fragment: bool,
) -> None:
    rows, cols = master.shape
    like = mf.tensor.quantize(master, spec, columnwise=columnwise, amax=given_amax(spec))
    layout = ops.fragment_layout([spec], [cols], [*cut], 1)
    whole = rows * ops.spec_sizes(spec, rows, cols)[0]
    size = layout[2] - layout[1] if is_fragment else whole
    shards.masters.append(master.flatten()[cut[0] : cut[1]].clone())
    shards.specs.append(spec)
    bf16 = dtype == torch.bfloat16
    shards.geometry += [columnwise, rows, cols, bf16, cut[0], is_fragment]
    shards.codes.append(torch.full((size,), 0xA5, dtype=torch.uint8))
    shards.scales.append(like.scale.clone())
    shards.amax.append(torch.full_like(like.amax, 0.75))


def pair_cuts(rows: int, cols: int) -> list[tuple[int, int]]:
    """Lists cuts: the whole, shards of any rows, ragged ones, and an empty one."""
    size = rows * cols
    third = rows // 3
    return [
        *((0, size), (third * cols, (rows - third) * cols), (rows // 2 * cols, size)),
        *((size // 7, size - size // 9), (third * cols + 4, size), (size // 2, size // 2)),
    ]


def add_pair(
    shards: Shards,
    specs: tuple[str, str],
    master: Tensor,
    dtype: torch.dtype,
    cut: tuple[int, int],
    is_fragment: bool,
) -> None:
    for spec, columnwise in zip(specs, (False, True)):
        add_shard(shards, spec, columnwise, master, dtype, cut, is_fragment)
    shards.masters[-1] = shards.masters[-2]


def given_amax(spec: str) -> Tensor | None:
    return torch.tensor(0.75) if "delayed" in spec else None


def mixed(seed: int, kind: str, count: int) -> Shards:
    """Makes weights of all formats, each with a cut."""
    pick, shards = random.Random(seed), Shards()
    for i in range(count):
        shape = pick.choice(SHAPES)
        dtype, compute = pick.choice(DTYPES)
        size = shape[0] * shape[1]
        begin, end = sorted(pick.randint(0, size) for _ in range(2))
        if i % 3 == 0:  # a cut where 16 bytes are aligned, or none
            begin, end = begin // 64 * 64, size
        master = values(kind, shape, dtype, seed + i)
        spec, side = SPECS[(seed + i) % len(SPECS)], pick.random() < 0.5
        add_shard(shards, spec, side, master, compute, (begin, end), pick.random() < 0.5)
    return shards


def require_same_outputs(there, host, what):
    """Runs both devices, and compares amaxes, codes and scales byte by byte."""
    there.run()
    host.run()
    names, found = zip(*there.outputs().items())
    for name, got, want in zip(names, on_cpu(found), host.outputs().values()):
        if got.element_size() == 1:
            got, want = got.view(torch.uint8), want.view(torch.uint8)
        require_same(got, want, f"{name}, {what}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 31, 40, 200, 1100])
def test_many_weights_have_the_bytes_of_the_cpu(device, kind, count):
    if count > 40 and kind not in ("wide", "special"):
        pytest.skip("long lists: two kinds of values")
    for seed in range(8 if count < 40 else 2):
        host = mixed(seed, kind, count)
        there = host.to(device)
        require_same_outputs(there, host, f"seed {seed}")


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_every_spec_at_sizes_of_training(device, spec, columnwise):
    master = values("normal", (1024, 1536), torch.float32)
    for cut in ((0, 1024 * 1536), (1024 * 384, 1024 * 768), (12345, 1024 * 1000 + 7)):
        shards = Shards()
        add_shard(shards, spec, columnwise, master, torch.bfloat16, cut, False)
        there = shards.to(device)
        require_same_outputs(there, shards, f"{cut}")


@pytest.mark.parametrize("kind", ["wide", "special", "zeros"])
@pytest.mark.parametrize("specs", PAIRS, ids=" and ".join)
def test_two_directions_of_one_master_have_the_bytes_of_the_cpu(device, specs, kind):
    shards, count = Shards(), 0
    for shape in PAIR_SHAPES:
        for dtype, compute in DTYPES:
            master = values(kind, shape, dtype, count)
            for cut in pair_cuts(*shape):
                add_pair(shards, specs, master, compute, cut, count % 2 == 0)
                count += 1
    require_same_outputs(shards.to(device), shards, f"{specs}")


def test_two_directions_at_sizes_of_training(device):
    master = values("normal", (1024, 1536), torch.float32)
    for specs in PAIRS[:7]:
        shards = Shards()
        for cut in ((0, 1024 * 1536), (1536 * 256, 1536 * 512), (1536 * 100, 1536 * 777)):
            add_pair(shards, specs, master, torch.bfloat16, cut, False)
        require_same_outputs(shards.to(device), shards, f"{specs}")


def test_transposes_of_every_width(device):
    pick, matrices, transposed, sizes = random.Random(0), [], [], []
    bands = [(1024, 768), (1040, 784), (2064, 272), (4096, 256)]  # one, and a low one below
    for shape in [*SHAPES, (256, 512), (512, 256), (272, 1040), (129, 16), *bands]:
        for bits in (4, 8, 32):
            rows, cols = shape
            pitch, back = -(-cols * bits // 8), -(-rows * bits // 8)
            matrix = torch.randint(256, (rows, pitch), dtype=torch.uint8)
            if bits == 4 and cols % 2:
                matrix[:, -1] &= 0x0F
            matrices.append(matrix)
            transposed.append(torch.full((cols, back), pick.randrange(256), dtype=torch.uint8))
            sizes += [rows, cols, bits]
    there = [t.to(device, copy=True) for t in transposed]
    native = torch.classes.minifloat
    native.MatrixTransposes(matrices, transposed, sizes).run()
    native.MatrixTransposes([m.to(device) for m in matrices], there, sizes).run()
    for i, (got, want) in enumerate(zip(on_cpu(there), transposed)):
        require_same(got, want, f"{sizes[3 * i : 3 * i + 3]}")


def test_fragments_merge_wherever_they_were_cut(device):
    pick = random.Random(1)
    specs = ["nvfp4", "mxfp8", "mxfp4"] * 20
    shapes = [pick.choice(SHAPES) for _ in specs]
    cuts = [sorted([0, r * c, *(pick.randint(0, r * c) for _ in range(3))]) for r, c in shapes]
    flat = [cut for of_wire in cuts for cut in of_wire]
    layout = ops.fragment_layout(specs, [c for _, c in shapes], flat, 4)
    gathered = torch.randint(256, (4 * layout[-1],), dtype=torch.uint8)
    sizes = [r * ops.spec_sizes(spec, r, c)[0] for spec, (r, c) in zip(specs, shapes)]
    wires = [torch.full((n,), 0xA5, dtype=torch.uint8) for n in sizes]
    there = [w.to(device, copy=True) for w in wires]
    ops.merge_fragments(gathered, wires, layout, 4)
    ops.merge_fragments(gathered.to(device), there, layout, 4)
    for got, want in zip(on_cpu(there), wires):
        require_same(got, want, "wire")


def test_a_step_on_one_rank_is_the_whole_cast(device):
    formats = [("nvfp4/16x16", "nvfp4/16x16"), ("mxfp8", "mxfp8"), ("e4m3/tensor", "e4m3/tensor")]
    masters = [values("wide", (160, 96), torch.float32, i).to(device) for i in range(3)]
    weights = [
        mf.QuantizedTensor.from_tensor(torch.zeros_like(m), *f) for m, f in zip(masters, formats)
    ]
    mf.distributed.quantize_master_weights(weights, [m.flatten() for m in masters], [0] * 3, None)
    mf.distributed.post_all_gather_processing(weights)
    for weight, master, specs in zip(weights, masters, formats):
        want = mf.QuantizedTensor.from_tensor(master, *specs)
        for side in ("rowwise", "columnwise"):
            got, expected = getattr(weight, side), getattr(want, side)
            require_same(got.codes, expected.codes, f"{side} codes")
            require_same(got.amax, expected.amax, f"{side} amax")
            assert torch.equal(got.dequantize(), expected.dequantize())


def test_nothing_waits_for_the_device_and_graphs_repeat_it(cuda):
    host = mixed(5, "normal", 60)
    master = values("normal", (256, 512), torch.float32)
    add_pair(host, ("mxfp8", "mxfp8"), master, torch.bfloat16, (512 * 64, 512 * 192), True)
    there, again = host.to(cuda), host.to(cuda)
    there.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a wait would end the capture
        again.run()
    graph.replay()
    for (name, got), want in zip(again.outputs().items(), there.outputs().values()):
        if "delayed" not in name:
            got, want = (t.reshape(-1).view(torch.uint8) for t in (got, want))
            require_same(got, want, name)


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "zeros"])
def test_rules_that_read_values_have_the_bytes_of_the_cpu(device, kind):
    """Casts shards of a whole weight, in which the cast itself makes the choices."""
    shards = Shards()
    specs = ("nvfp4+4over6", "nvfp4/16x16+4over6")
    for i, shape in enumerate([(16, 16), (33, 70), (130, 144), (257, 48), (1024, 1536)]):
        for dtype, compute in DTYPES:
            master = values(kind, shape, dtype, i)
            whole = (0, shape[0] * shape[1])
            for spec in specs:
                for columnwise in (False, True):
                    add_shard(shards, spec, columnwise, master, compute, whole, False)
            add_pair(shards, specs, master, compute, whole, True)
            add_pair(shards, (specs[1], specs[1]), master, compute, whole, True)
    require_same_outputs(shards.to(device), shards, kind)
