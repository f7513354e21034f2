"""Optimizers by name, and what each does with converted weights: gpu_moments.py prints it.

Each case trains a layer of 256 x 256 for some steps, and ends with the losses or the first error. A
kernel that writes through the pointer of a parameter without memory of its own ends all further
work of its process on the GPU. So each optimizer's cases are a process of their own, and the case
in which that may happen is the last.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _gpu_timing  # noqa: F401  first: it makes minifloat importable
import minifloat as mf
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _measure import product_dtype
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Optimizer = torch.optim.Optimizer
WIDTH, STEPS = 256, 5


@dataclass(frozen=True)
class Options:
    """The settings that all optimizers share."""

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0


def torchaos(name: str) -> Callable[[list[Any], Options], Optimizer]:
    def make(parameters: list[Any], options: Options) -> Optimizer:
        import torchao.optim

        is_bf16 = parameters[0].dtype == torch.bfloat16
        make = getattr(torchao.optim, name)
        made: Optimizer = make(parameters, **asdict(options), bf16_stochastic_round=is_bf16)
        return made

    return make


def transformer_engines(dtype: torch.dtype) -> Callable[[list[Any], Options], Optimizer]:
    def make(parameters: list[Any], options: Options) -> Optimizer:
        from transformer_engine.pytorch.optimizers import FusedAdam

        made: Optimizer = FusedAdam(
            parameters,
            **asdict(options),
            exp_avg_dtype=dtype,
            exp_avg_sq_dtype=dtype,
            master_weights=parameters[0].dtype == torch.bfloat16,
        )
        return made

    return make


OPTIMIZERS: dict[str, Callable[[list[Any], Options], Optimizer]] = {
    "AdamW fused": lambda p, o: torch.optim.AdamW(p, **asdict(o), fused=True),
    "AdamW foreach": lambda p, o: torch.optim.AdamW(p, **asdict(o), foreach=True),
    "AdamW8bit": torchaos("AdamW8bit"),
    "AdamWFp8": torchaos("AdamWFp8"),
    "FusedAdam": transformer_engines(torch.float32),
    "FusedAdam fp8": transformer_engines(torch.uint8),
}


# ---- bytes ---------------------------------------------------------------------------------------


def tensor_bytes(value: object) -> int:
    """Counts the bytes of a state: of the tensors inside, where it is a wrapper."""
    if isinstance(value, DTensor):
        return tensor_bytes(value.to_local())
    if not isinstance(value, Tensor):
        return 0
    if hasattr(value, "_scale_inv"):  # Transformer Engine's Float8Tensor
        return tensor_bytes(value._data) + tensor_bytes(value._scale_inv)
    if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes


def state_bytes(optimizer: Optimizer) -> int:
    return sum(tensor_bytes(v) for state in optimizer.state.values() for v in state.values())


# ---- cases ---------------------------------------------------------------------------------------


def built(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    model = nn.Sequential(*layers).to(device, dtype)
    mf.quantize_(model, "fp8_tensorwise", keep="nothing", data_parallel_rank=0, **options)
    return model


class Trainer:
    """A model, an optimizer, and the batches of a device."""

    def __init__(self, name: str, model: nn.Module, parameters: list[Any] | None = None) -> None:
        self.model = model
        self.optimizer = OPTIMIZERS[name](parameters or list(model.parameters()), Options())
        self.device = next(model.parameters()).device
        self.taken = 0

    def backward(self) -> float:
        dtype = next(self.model.parameters()).dtype
        generator = torch.Generator().manual_seed(self.taken)
        x = torch.randn(64, WIDTH, generator=generator).to(self.device, dtype)
        with torch.autocast(
            self.device.type, product_dtype(self.device.type), dtype == torch.float32
        ):
            loss = (self.model(x).float() - x.flip(1).float()).square().mean()
        loss.backward()
        self.taken += 1
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mf.step(self.model)

    def losses(self, steps: int = STEPS) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(self.backward())
            self.update()
        return found


def described(losses: list[float]) -> str:
    """Says whether the loss has fallen: every case begins at about 1.3 and falls by a tenth."""
    trains = losses[-1] < 0.95 * losses[0]
    return f"{'trains' if trains else 'DOES NOT TRAIN'}: {losses[0]:.4f} -> {losses[-1]:.4f}"


def in_bf16(name: str, device: torch.device) -> str:
    return described(Trainer(name, built(device, torch.bfloat16)).losses())


def sharded(name: str, device: torch.device) -> Trainer:
    return Trainer(name, fully_shard(built(device)))


def under_fsdp2(name: str, device: torch.device) -> str:
    """Compares with a model that is not sharded: one rank's shard is the whole weight."""
    losses, alone = sharded(name, device).losses(), Trainer(name, built(device)).losses()
    return f"{described(losses)}, unsharded -> {alone[-1]:.4f}"


def in_bf16_under_fsdp2(name: str, device: torch.device) -> str:
    return described(Trainer(name, fully_shard(built(device, torch.bfloat16))).losses())


def by_dcp(name: str, device: torch.device) -> str:
    """Saves after STEPS steps, loads into another model, and compares the next steps of both."""

    def state_of(trainer: Trainer) -> dict[str, Any]:
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        return {"model": model, "optimizer": optimizer}

    first, second = sharded(name, device), sharded(name, device)
    first.losses()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state_of(first), checkpoint_id=folder)
        state = state_of(second)
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        second.model,
        second.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    second.taken = first.taken
    mf.step(second.model)
    gone_on, resumed = first.losses(), second.losses()
    word = "equal" if gone_on == resumed else "DIFFER"
    return f"the next losses {word}: {gone_on[-1]:.6f}, {resumed[-1]:.6f}"


def on_masters(name: str, device: torch.device) -> str:
    """Updates fp32 masters, then casts them to the model's codes."""
    masters = [p.detach().clone().requires_grad_() for p in built(device).parameters()]
    trainer = Trainer(name, built(device, primary=True), masters)
    weights = list(trainer.model.parameters())
    losses = []
    for _ in range(STEPS):
        losses.append(trainer.backward())
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.to(master.dtype), None
        trainer.optimizer.step()
        flat = [m.detach().flatten() for m in masters]
        mf.distributed.quantize_master_weights(weights, flat, [0] * len(flat), None)
        mf.distributed.post_all_gather_processing(weights)
    return described(losses)


def on_codes(name: str, device: torch.device) -> str:
    return described(Trainer(name, built(device, primary=True)).losses())


CASES = {
    "bf16": in_bf16,
    "FSDP2, gather as codes": under_fsdp2,
    "FSDP2, bf16 parameters": in_bf16_under_fsdp2,
    "FSDP2, DCP": by_dcp,
    "primary, masters": on_masters,
    "primary, codes": on_codes,  # last: see the top
}


def cases_of(name: str, device: torch.device) -> None:
    """Prints a line of JSON a case."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        for case, run in CASES.items():
            try:
                result = run(name, device)
            except Exception as error:
                result = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
            print(json.dumps({"optimizer": name, "case": case, "result": result}), flush=True)
        mf.distributed.destroy_process_group()


def run_cases(names: list[str], device: torch.device) -> list[dict[str, str]]:
    """Runs each optimizer's cases in a process, all at once; returns what each case ended with."""
    file, pipe = str(Path(__file__)), subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, file, name, device.type], stdout=pipe, stderr=pipe, text=True
        )
        for name in names
    ]
    rows: list[dict[str, str]] = []
    for name, process in zip(names, processes, strict=True):
        out, errors = process.communicate()
        rows += [json.loads(line) for line in out.splitlines() if line.startswith('{"optimizer"')]
        if process.returncode:
            last = (errors.strip().splitlines() or ["-"])[-1]
            rows.append({"optimizer": name, "case": "the process", "result": f"ended: {last}"})
    return rows


if __name__ == "__main__":
    if sys.argv[2] == "cpu":
        torch.compiler.set_stance("force_eager")  # torchao's update, minutes on a CPU
    cases_of(sys.argv[1], torch.device(sys.argv[2]))
