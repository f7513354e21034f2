"""Golden cases of bytes between casts: messages, packed rows, shards of weights, activations.

The ops here are those that layers and ranks call where no Python function leads to the bytes.
Activations and their gradients are exact by contract (docs/numerics.md, sections 11 and 12).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor

from tests.golden import tables
from tests.golden.casts import DTYPES, SEED, STREAM, Case, is_nearest, parts
from tests.golden.inputs import any_bytes, digest, hashed, integers, values

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
CASTS = ("mxfp8", "nvfp4", "nvfp4+pow2", "e4m3/row", "e4m3/tensor", "nvfp4+sr+rht", "mxfp4+sr+rht")


def cases(device: torch.device) -> Iterator[Case]:
    yield from messages(device)
    yield from packed_rows(device)
    yield from shards(device)
    yield from as_fp8(device)
    yield from random_states(device)
    yield from histories(device)
    yield from activations(device)
    yield from swiglus(device)


def messages(device: torch.device) -> Iterator[Case]:
    """Casts messages of gradients, and adds those of three ranks."""
    for spec in ("bf16", *tables.specs()):
        try:
            lengths = [ops.message_bytes(spec, cols) for cols in (1, 129, 2048 + 300)]
        except ValueError:
            continue  # no message has this spec
        found = [torch.tensor(lengths)]
        for cols, dtype in product((129, 2048 + 300), DTYPES.values()):
            sent = []
            for rank in range(3):
                x = values("edges" if rank else "bell", (3, cols), dtype, rank).to(device)
                rng = torch.tensor([SEED, rank], device=device)
                given = {"rng": rng} if "+sr" in spec else {}
                is_cast = spec != "bf16"
                made = ops.quantize_messages(x, spec, stream=STREAM, **given) if is_cast else x
                sent.append(made if is_cast else x.bfloat16().view(torch.uint8))
            received = torch.stack([m[1] for m in sent])
            total = torch.empty(cols, dtype=dtype, device=device)
            ops.sum_messages(received, spec, total)
            found += [part for m in sent for part in of_message(m, spec, cols)] + [total]
        yield f"message {spec}", digest(found)


def of_message(sent: Tensor, spec: str, cols: int) -> list[Tensor]:
    """Returns codes and scales of messages (ranks, bytes); the bytes past each are unspecified."""
    parsed = Spec.parse(spec)
    codes = cols * parsed.code_bits // 8 if parsed.code_bits != 4 else -(-cols // 2)
    begin = -(-codes // 16) * 16
    scales = -(-cols // parsed.block[1]) * parsed.scale_dtype.itemsize if parsed.has_blocks else 0
    return [sent[:, :codes], sent[:, begin : begin + scales]]


def packed_rows(device: torch.device) -> Iterator[Case]:
    """Lays fields side by side in rows, as ranks send them to experts."""
    sizes = [80, 3, 16, 1]
    layout = torch.tensor(ops.row_layout(sizes))
    fields = [any_bytes((40, size), i).to(device) for i, size in enumerate(sizes)]
    index = (hashed(64, 3) % 80).int().to(device)
    rows_from = (hashed(90, 4) % 65 - 1).int().to(device)
    plain = ops.pack_rows(fields)
    found = [layout, plain, ops.pack_rows(fields[:3], index, slots=[2, 2, 2])]
    found.append(ops.pack_rows(fields[:3], index, slots=[2, 2, 2], rows_from=rows_from))
    yield "pack_rows", digest(found)


def shards(device: torch.device) -> Iterator[Case]:
    """Casts whole masters, and shards of masters one after the other, whose codes are merged."""
    nearest = [s for s in tables.plain_specs() if is_nearest(s) and tables.of_weight(s) == s]
    pairs = [(spec, spec) for spec in nearest] + list(zip(nearest, nearest[3:] + nearest[:3]))
    for row, col in pairs:
        found: list[Tensor] = []
        for shape, dtype in (((33, 70), torch.bfloat16), ((128, 96), torch.float32)):
            master = values("bell", shape, torch.float32, 5).flatten().to(device)
            like = torch.zeros(shape, dtype=dtype, device=device)
            weight = mf.QuantizedTensor.from_tensor(like, row, col)
            mf.distributed.quantize_master_weights([weight], [master], [0], None)
            mf.distributed.post_all_gather_processing([weight])
            found += [t for q in weight.directions for t in parts(q)]
            if "+4over6" not in row + col:  # shards of these need a group: see sent.py
                found += of_shards(weight, master)
        yield f"shards {row} {col}", digest(found)


def of_shards(weight: mf.QuantizedTensor, master: Tensor) -> Iterator[Tensor]:
    """Casts four shards, one of them empty, by their own amaxes: no group exchanges them."""
    size = master.numel()
    cuts = [0, size // 3 // 2 * 2, size // 3 // 2 * 2, size * 2 // 3 // 2 * 2, size]
    layout = mf.distributed.WireLayout.of([weight], len(cuts) - 1, [cuts])
    yield torch.tensor(layout.numbers)
    pieces = []
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        pieces.append(layout.new_piece(weight.directions[0].codes))
        fragments = layout.fragments(pieces[-1], rank)
        mf.distributed.quantize_master_weights(
            [weight], [master[begin:end]], [begin], None, fragments
        )
        yield from (t.clone() for q in weight.directions for t in (q.scale, q.amax))
    layout.merge_fragments(torch.cat(pieces), [weight])
    mf.distributed.post_all_gather_processing([weight])
    yield from (*mf.distributed.wires(weight), *(q.codes for q in weight.directions))


def as_fp8(device: torch.device) -> Iterator[Case]:
    for spec in tables.plain_specs():
        parsed, found = Spec.parse(spec), []
        if not parsed.is_fp4_by_powers_of_two:
            continue
        for shape, columnwise in product(((33, 130), (128, 256)), (False, True)):
            x = values("edges", shape, torch.bfloat16, 8).to(device)
            q = mf.tensor.quantize(x, spec, columnwise=columnwise)
            found += ops.fp4_as_fp8(q.codes, q.scale.view(torch.uint8), q.amax, spec, q.shape[-1])
        yield f"fp4_as_fp8 {spec}", digest(found)


def random_states(device: torch.device) -> Iterator[Case]:
    """Names streams, mixes seeds, and advances a state."""
    names = [*ops.operand_names(), "fprop", "dgrad", "wgrad", "layers.0.wq", "experts.w13", ""]
    streams = [ops.stream(name) for name in names]
    seeds = [ops.mix_seed(seed, n) for seed in (0, 7, -(2**62)) for n in (0, 1, 2**40)]
    state = torch.tensor([SEED, 2**63 - 1], device=device)
    copies = [ops.advance_random_state(state) for _ in range(2)]
    yield "random state", digest([torch.tensor([*streams, *seeds]), *copies, state])


def histories(device: torch.device) -> Iterator[Case]:
    """Rolls amax histories with zeros, infinities and NaN."""
    pool = torch.tensor([0.0, 0.0, 1.5, 3.25, 1e-40, 3e38, torch.inf, torch.nan])
    for algorithm, margin in product(("max", "most_recent"), (0, 1, 126)):
        rows = [pool[hashed(6 * (1 + n), n) % 8].view(6, 1 + n).to(device) for n in (1, 4, 16)]
        rows.append(pool[hashed(90, 5) % 8].view(6, 3, 5).to(device))
        for _ in range(3):
            for history in rows:
                history[..., 1] = 2.5
                ops.roll_amax_histories([history], algorithm=algorithm, margin=margin)
        yield f"history {algorithm} {margin}", digest(rows)


# ---- activations ---------------------------------------------------------------------------------


def activations(device: torch.device) -> Iterator[Case]:
    for kind, gated, (name, dtype) in product(ACTIVATIONS, (True, False), DTYPES.items()):
        found: list[Any] = []
        for data, scale in (("bell", 4.0), ("edges", 1.0), ("rows", 1.0)):
            gate, up, dh = (
                (values(data, (64, 160), dtype, i) * scale).to(device) for i in range(3)
            )
            given = (gate, up if gated else None, kind)
            found.append(ops.activation(*given))
            found += ops.activation_backward(dh, *given)[: 1 + gated]
        label = f"{kind}{' gated' if gated else ''} {name}"
        yield f"activation {label}", digest(found)
    for spec, gated in product(CASTS, (True, False)):
        rng = torch.tensor([SEED, 1], device=device)
        gate, up, dh = (values("bell", (64, 160), torch.bfloat16, i).to(device) for i in range(3))
        other = up if gated else None
        h = ops.quantize_activation(
            gate, other, "silu", spec, spec, rng=rng, stream_row=3, stream_col=5
        )
        rngs = {f"{part}_rng": rng for part in ("gate", "up", "h") if gated or part != "up"}
        grads = ops.quantize_activation_backward(
            dh, gate, other, "silu", spec, spec, spec, **rngs, gate_stream_row=1, up_stream_col=2
        )
        yield f"activation cast {spec}{' gated' if gated else ''}", digest([*h, *grads])


def swiglus(device: torch.device) -> Iterator[Case]:
    """Computes SwiGLU of groups, its gradients, and casts of both."""
    forms: dict[str, dict[str, Any]] = {
        "two": {},
        "limit": {"limit": 1 + 2.0**-8, "alpha": 1.702},
        "one": {},
        "interleaved": {"limit": 7.0, "interleaved": True},
    }
    table = mf.tensor.group_table(torch.tensor([20, 20, 64]).int().to(device), 80)
    pairs = torch.arange(80).flip(0).int().to(device)
    weights = (integers(-8, 8, (80,), 3) * 0.125).to(device)
    for (form, options), (name, dtype) in product(forms.items(), DTYPES.items()):
        width = 320 if form in ("one", "interleaved") else 160
        gate, up = ((values("bell", (80, width), dtype, i) * 2).to(device) for i in range(2))
        dh = values("bell", (80, 160), dtype, 5).to(device)
        given = (gate, up if width == 160 else None, weights)
        more = {**options, "pairs": pairs, "groups": table}
        *grads, found = ops.swiglu_backward(dh, *given, **more, amaxes=True)
        results = [ops.swiglu(*given, **more), *grads[: 2 if width == 160 else 1], grads[-1]]
        amaxes = [a[:64] if a.dim() == 1 and a.numel() == 80 else a for a in found]
        yield f"swiglu {form} {name}", digest([*results, *amaxes])
        rng = torch.tensor([SEED, 1], device=device)
        for spec in CASTS if dtype == torch.bfloat16 else ():
            row = ops.quantize_swiglu(*given, spec, "", **more, rng=rng, stream_row=3)
            q = mf.tensor.Quantized(row[0], row[1], row[2], spec, (80, 160))
            yield f"swiglu cast {form} {spec}", digest([q.codes[:64]])
