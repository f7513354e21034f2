"""mf.MoE divided over GPUs of one host: time of both passes, and bytes that dispatch sends.

torchrun --nproc-per-node 2 benchmarks/gpu_expert_parallel.py [--recipes …]
torchrun --nproc-per-node 2 benchmarks/gpu_expert_parallel.py --capacities 1.125 --graph
torchrun --nproc-per-node 4 benchmarks/gpu_expert_parallel.py --layers 7168x2048x32x4 --tokens 4096
    [--shards 2]                        # FSDP2 over 2 ranks, expert parallel over the other 2

layer   D x I x experts x k, by default 7168x2048x8x2 and 2048x768x128x8; bf16 parameters, w13
        fused; each rank has `--tokens` tokens
wires   an all-to-all of 64 MiB a rank: GB/s that a GPU receives from the others
sizes   --capacities: none, exact sizes; all, room for every row; a number, that many times the mean
        number of rows from a rank to another. --graph captures forward, backward and mf.step in a
        CUDA graph and times its replays, which needs a capacity
time    median of forward and backward by the host's clock, of the slowest rank
dropped rows past the capacity on rank 0, of an uncaptured step
bytes   of one row at torch's collective, x in forward and g in backward
ratio   the time of the first recipe, bf16 by default, of the same capacity over the recipe's;
        x_share and g_share: the recipe's bytes over that one's
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import _ranks as ranks
import minifloat as mf
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.collectives import rows_sent
from tests.support.graphs import captured

LAYERS = "7168x2048x8x2,2048x768x128x8"
SIZES = "dim", "hidden", "experts", "top_k"
RECIPES = "bf16,fp8_rowwise,fp8_tensorwise,fp8_blockwise,mxfp8,mxfp4,nvfp4,nvfp4_pow2"
TINY = {"dim": 64, "hidden": 64, "experts": 8, "top_k": 2}  # for --device cpu


def built(layer: dict[str, int], recipe: str, mesh: DeviceMesh, **options: Any) -> mf.MoE:
    """Builds a layer, its experts divided over the mesh's "ep" and sharded over its "shards"."""
    torch.manual_seed(0)
    moe = mf.MoE(**layer, fused_w13=True, dtype=torch.bfloat16, device=mesh.device_type)
    if recipe != "bf16":
        mf.quantize_(moe, recipe, data_parallel_rank=dist.get_rank())
    if mesh["shards"].size() == 1:
        return mf.expert_parallel(moe, dist.group.WORLD, **options)
    mf.expert_parallel(moe, mesh["ep"], **options)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(moe.experts, mesh=mesh["shards"], mp_policy=policy)
    return moe


def capacity_of(text: str, layer: dict[str, int], tokens: int, ranks: int) -> int | str | None:
    """Returns the `capacity` of mf.expert_parallel for an entry of --capacities."""
    if text in ("none", "all"):
        return None if text == "none" else text
    return math.ceil(float(text) * tokens * layer["top_k"] / ranks)


def measure(moe: mf.MoE, tokens: int, repeats: int, graph: bool) -> dict[str, Any]:
    """Returns the median time of both passes in ms, and the bytes of a row of x and of g."""
    torch.manual_seed(1 + dist.get_rank())
    device = moe.router.weight.device
    x = torch.randn(tokens, moe.router.dim, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    g = torch.randn_like(x)

    def step() -> None:
        moe.zero_grad()
        moe(x).backward(g)
        mf.step(moe)  # weights are quantized anew

    with rows_sent() as rows:
        step()
    run = step
    if graph:
        run = captured(step, capture_error_mode="thread_local")[0].replay
    times = []
    for i in range(repeats + repeats // 4 + 1):
        dist.barrier()
        wait()
        begin = time.perf_counter()
        run()
        wait()
        if i > repeats // 4:
            times.append(1e3 * (time.perf_counter() - begin))
    (_, x_row), _, (_, g_row), _ = rows
    found = {"ms": ranks.slowest(statistics.median(times), device), "x": x_row, "g": g_row}
    return {**found, "dropped": moe.experts.parallel.step_dropped}


def main() -> None:
    parser = timing.arguments(__doc__, "gpu_expert_parallel.json")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=timing.shapes, default=LAYERS, help="%(default)s")
    parser.add_argument("--shards", type=int, default=1, help="ranks of FSDP2: %(default)s")
    parser.add_argument("--capacities", default="none,all", help="%(default)s")
    parser.add_argument("--graph", action="store_true", help="replays of a CUDA graph")
    args = parser.parse_args()
    if args.graph and "none" in args.capacities.split(","):
        parser.error("--graph: expected --capacities without none, which waits for the device")
    device = ranks.join(timing.require_device(args.device).type)
    is_cuda = device.type == "cuda"
    sizes = args.shards, dist.get_world_size() // args.shards
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("shards", "ep"))
    wires = ranks.all_to_all_gb_s(device) if is_cuda else None
    records: list[dict[str, Any]] = []
    asked = [dict(zip(SIZES, layer, strict=True)) for layer in args.layers]
    layers = asked if is_cuda else [TINY]
    repeats = 5 if args.quick else 20
    for layer in layers[:1] if args.quick else layers:
        for entry in args.capacities.split(","):
            capacity = capacity_of(entry, layer, args.tokens, sizes[1])
            bf16: dict[str, Any] = {}
            for recipe in args.recipes.split(","):
                for dispatch in ("compute_dtype", "codes"):
                    if recipe == "bf16" and dispatch == "codes":
                        continue
                    options = {"dispatch": dispatch, "capacity": capacity}
                    moe = built(layer, recipe, mesh, **options)
                    found = measure(moe, args.tokens, repeats, args.graph)
                    bf16 = bf16 or found
                    ratios = {
                        "ratio": bf16["ms"] / found["ms"],
                        "x_share": found["x"] / bf16["x"],
                        "g_share": found["g"] / bf16["g"],
                    }
                    options |= {"graph": args.graph}
                    records.append({**layer, "recipe": recipe, **options, **found, **ratios})
                    if dist.get_rank() == 0:
                        print(records[-1], flush=True)
                    if is_cuda:
                        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        timing.write_json(args.out, device, all_to_all_gb_s=wires, sizes=sizes, layers=records)
    mf.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
