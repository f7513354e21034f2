"""Golden cases of what two ranks send: gathered weights, gradients, rows of experts.

Two processes over gloo train small models. A line has a digest of the bytes (uint8) and the amaxes
(int32) that both ranks give to collectives, in their order, and sums of each rank's results. Values
in the compute dtype, results of experts, and the texts by which ranks agree are no part of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.spec import Spec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from tests.golden import tables
from tests.golden.casts import Case, is_nearest, parts
from tests.golden.inputs import digest, planted, values
from tests.golden.layers import EDEN, Line, amax_of, fill, moe_arguments
from tests.golden.wires import of_message
from tests.support.worlds import run_world

RANKS = 2
WIRES = (torch.uint8, torch.int32)
GRADIENT = (128 + 1) * 64 // RANKS  # elements of a layer that each rank sums
GRADIENTS = ("e4m3/1x128+sr", "mxfp8", "mxfp4+sr", "bf16")

Run = Callable[[DeviceMesh, "Line"], None]


def cases(device: torch.device) -> Iterator[Case]:
    """Runs the world, and joins the lines of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_world(RANKS, record, folder)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for name in ranks[0]:
        digests, sums = zip(*(found[name].partition(" ")[::2] for found in ranks))
        joined = digest([torch.tensor(bytearray("".join(digests).encode()))])
        named = (f"{rank}.{text}" for rank, texts in enumerate(sums) for text in texts.split())
        yield name, " ".join((joined, *named))


def record(rank: int, folder: str) -> None:
    """Runs each case on one rank, and writes its lines."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ranks",))
    found = {}
    for name, run in runs():
        line = Line()
        with Sent() as sent:
            run(mesh, line)
        kind, _, spec = name.partition(" ")
        if kind == "experts":  # rows of x and of y's gradient, not the results that come back
            bytes_ = [t for t in sent.tensors if t.dtype == torch.uint8][::2]
            sent.tensors = bytes_ + [t for t in sent.tensors if t.dtype != torch.uint8]
        for t in sent.tensors:
            line.exact += of_message(t, spec, GRADIENT) if kind == "gradients" else [t]
        found[name] = line.text()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


class Sent(TorchDispatchMode):
    """Copies what is given to collectives in a dtype of WIRES."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name().startswith("c10d::"):
            given = args[0] if isinstance(args[0], list) else args[:2]  # in place, or (out, input)
            source = [t for t in given if isinstance(t, Tensor)][-1]
            if source.dtype in WIRES:
                self.tensors.append(source.clone())
        return func(*args, **(kwargs or {}))


def runs() -> Iterator[tuple[str, Run]]:
    recipes = [name for name in mf.presets() if name != "bf16"]
    for name in recipes:
        yield f"fsdp {name}", lambda mesh, line, name=name: train_fsdp(mesh, line, name)
        yield f"experts {name}", lambda mesh, line, name=name: train_experts(mesh, line, name)
        yield f"tensor parallel {name}", lambda mesh, line, name=name: train_cut(mesh, line, name)
    yield "fsdp eden", lambda mesh, line: train_fsdp(mesh, line, EDEN)
    for spec in GRADIENTS:
        yield f"gradients {spec}", lambda mesh, line, spec=spec: send_gradients(mesh, line, spec)
    for spec in tables.plain_specs():
        if is_nearest(spec) and tables.of_weight(spec) == spec:
            yield f"masters {spec}", lambda mesh, line, spec=spec: cast_masters(line, spec)


def two_layers(hidden: int = 64) -> nn.Sequential:
    layers = nn.Linear(128, hidden), nn.ReLU(), nn.Linear(hidden, 32, bias=False)
    return nn.Sequential(*layers).bfloat16()


def train_steps(
    model: nn.Module, line: Line, amax: float, shape: tuple[int, int], out: int
) -> None:
    """Runs two steps of each rank's own data."""
    for step in range(2):
        seed = 10 * dist.get_rank() + step
        x = planted(shape, amax, 3 + seed).bfloat16().requires_grad_()
        y = model(x)
        y.backward(planted((shape[0], out), amax, 70 + seed).to(y))
        line.add("y", y)
        line.add("x", x.grad)
        mf.step(model)


def send_gradients(mesh: DeviceMesh, line: Line, spec: str) -> None:
    """Sends the gradients of one layer, whose sums are exact: they are cast again."""
    model = nn.Sequential(nn.Linear(128, 64)).bfloat16()
    fill(model, 28, 5)
    mf.quantize_(model, "mxfp8", keep="nothing")
    fully_shard(model, mesh=mesh)
    mf.distributed.quantize_gradients_(model, spec, seed=3)
    train_steps(model, line, 28, (32, 128), 64)
    line.exact += [p.grad.to_local() for p in model.parameters()]


def train_fsdp(mesh: DeviceMesh, line: Line, recipe: str) -> None:
    amax, model = amax_of(recipe), two_layers()
    fill(model, amax, 5)
    mf.quantize_(model, recipe, keep="nothing")
    fully_shard(model, mesh=mesh)
    mf.distributed.precompute_scales(model)
    train_steps(model, line, amax, (32, 128), 32)
    for name, p in model.named_parameters():
        line.add(name, p.grad.to_local())


def train_cut(mesh: DeviceMesh, line: Line, recipe: str) -> None:
    amax, model = amax_of(recipe), two_layers(256)  # whole blocks of 128 on each rank
    fill(model, amax, 5)
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for step in range(2):  # of one x: ranks of tensor parallelism share it
        x = planted((32, 128), amax, 3 + step).bfloat16().requires_grad_()
        y = model(x)
        y.backward(planted((32, 32), amax, 70 + step).to(y))
        line.add("y", y)
        line.add("x", x.grad)
        mf.step(model)


def train_experts(mesh: DeviceMesh, line: Line, recipe: str) -> None:
    for dispatch in ("codes", "compute_dtype"):
        moe = mf.MoE(128, 64, 4, 2, dtype=torch.bfloat16)
        arguments = moe_arguments(moe, recipe)
        _, x, g, amax, _ = arguments
        fill(moe, amax, 5)
        mf.quantize_(moe, recipe, keep="nothing")
        mf.expert_parallel(moe, mesh["ranks"], dispatch=dispatch)
        for step in range(2):
            data = x(10 * dist.get_rank() + step).requires_grad_()
            y = moe(data)
            y.backward(g(step).to(y))
            line.add(f"{dispatch}.y", y)
            line.add(f"{dispatch}.x", data.grad)
            mf.step(moe)


def cast_masters(line: Line, spec: str) -> None:
    """Casts weights whose masters are cut over ranks, within blocks too, and gathers codes."""
    for shape, cut in (((33, 70), 1113), ((128, 96), 128 * 48)):
        size, rank = shape[0] * shape[1], dist.get_rank()
        begin, end = ((0, cut), (cut, size))[rank]
        master = values("bell", shape, torch.float32, 5).flatten()[begin:end]
        columnwise = spec if Spec.parse(spec).block[0] > 1 else "mxfp8"
        weight = mf.QuantizedTensor.from_tensor(torch.zeros(shape).bfloat16(), spec, columnwise)
        layout = mf.distributed.WireLayout.of([weight], RANKS, [[0, cut, size]])
        piece = layout.new_piece(weight.directions[0].codes)
        fragments = layout.fragments(piece, rank)
        mf.distributed.quantize_master_weights([weight], [master.clone()], [begin], None, fragments)
        layout.gather(piece, [weight], None)
        mf.distributed.post_all_gather_processing([weight])
        for q in weight.directions:
            line.exact += parts(q)
