"""Golden cases of layers: outputs, gradients and training state over three steps.

A line has a digest of what is equal on every device bit for bit, and sums of the other results:

    digest      amax histories and random counts after each step; results of products whose sums
                are exact in fp32, in any order
    y=, w=, …   weighted sums of other results, a name for all steps (inputs.weighted_sum)

A product's sums are exact where its operands have no transform, and where both of them are inputs
of the case: integers with one amax in each block (inputs.planted). That amax makes each scale a
power of two: 28 = 448 / 2^4 for FP8, 84 = 2688 / 2^5 for NVFP4, 24 = 1536 / 2^6 where NVFP4's
tensor scale is of 1536; of E1M2 28 under MX, 49 = 784 / 2^4 and, of 448, 28. So the hidden tensor
of a feed-forward, and each cast in it, is exact too; products that read it are compared by sums.
SiLU and GELU of the ops are exact by contract (docs/numerics.md, sections 11 and 12). torch's SiLU
is not: the shared experts of mf.MoE call it, and their results are sums. Recipes whose amaxes would
show it have no shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import minifloat as mf
import torch
from minifloat.spec import Spec
from torch import Tensor, nn

from tests.golden import tables
from tests.golden.casts import DTYPES, Case
from tests.golden.inputs import digest, hashed, integers, outliers, planted, weighted_sum

STEPS = (1.0, 4.0, 0.5)  # factors of each step's inputs: a delayed scale saturates in the second
SEED = 2**40 + 7
WHOLE, RAGGED = (128, 128, 64), (37, 80, 48)  # M, K, N
TOKENS, DIM, HIDDEN, EXPERTS = 96, 128, 128, 4
EDEN = "fprop=nvfp4*nvfp4/16x16 dgrad=nvfp4+eden*nvfp4+eden wgrad=nvfp4+eden*nvfp4+eden"


def every_spec() -> dict[str, str]:
    """Returns recipes by name: every preset, MS-EDEN, and each plain spec with `+sr` and `+rht`."""
    recipes = {name: name for name in mf.presets()} | {"eden": EDEN}
    for spec in tables.plain_specs():
        w = tables.of_weight(spec)
        recipes[spec] = f"fprop={spec}*{w} dgrad={spec}+sr*{w} wgrad={spec}+sr+rht*{spec}+rht"
    return recipes


def amax_of(recipe: str) -> float:
    if "e1m2/1x16" in recipe or "e1m2/16x16" in recipe:
        return 28.0 if "pow2" in recipe else 49.0
    if "nvfp4" not in recipe:
        return 28.0
    return 24.0 if "pow2" in recipe or "4over6" in recipe else 84.0


def is_exact(part: mf.recipe.Product) -> bool:
    return not any(Spec.parse(spec).transform for spec in (part.a, part.b))


@dataclass
class Line:
    """The results of a case."""

    exact: list[Tensor] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, t: Tensor | None, exact: bool = False) -> None:
        if t is None:
            return
        if exact:
            self.exact.append(t.detach().clone())
        else:
            self.sums[name] = self.sums.get(name, 0.0) + weighted_sum(t)

    def text(self) -> str:
        sums = (f"{name}={value:.4f}" for name, value in self.sums.items())
        return " ".join((digest(self.exact), *sums))


def cases(device: torch.device) -> Iterator[Case]:
    yield from linears(device)
    yield from options(device)
    yield from functions(device)
    yield from mlps(device)
    yield from experts(device)


# ---- training ------------------------------------------------------------------------------------


def fill(model: nn.Module, amax: float, seed: int) -> None:
    """Writes new weights, as an optimizer does: in place."""
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "router" in name:
                continue
            is_bias = p.dim() == 1 or name.split(".")[-1].startswith("b")
            made = integers(-4, 4, p.shape, seed + i)
            p.copy_(made if is_bias else planted(p.shape, amax, seed + i))


def train(
    model: nn.Module,
    x: Callable[[int], Tensor],
    g: Callable[[int], Tensor],
    amax: float,
    exact: Mapping[str, bool],
    *,
    microbatches: int = 1,
) -> Line:
    """Runs three steps of new weights, and records results and state. exact: by a result's name."""
    line = Line()
    device = next(model.parameters()).device
    for s, factor in enumerate(STEPS):
        fill(model, amax * factor, 100 * s)
        for i in range(microbatches):
            data = (x(10 * s + i) * factor).to(device).requires_grad_()
            y = model(data)
            y.backward((g(10 * s + i) / factor).to(y))
            line.add("y", y, exact.get("y", False))
            line.add("x", data.grad, exact.get("x", False))
        for name, p in model.named_parameters():
            grad = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            line.add(name, grad, exact.get(name.split(".")[-1], False))
            p.grad = None
        mf.step(model)
        line.exact += mf.training_state(model).values()
        with torch.no_grad():  # changes no state
            line.add("eval", model.eval()(x(s).to(device)), exact.get("y", False))
        model.train()
    return line


def exact_results(recipe: str) -> dict[str, bool]:
    parsed = mf.Recipe(recipe)
    results = {"y": parsed.fprop, "x": parsed.dgrad, "weight": parsed.wgrad}
    # Factors of these two are powers of two under different amaxes; others round in some order.
    specs = f"{parsed.fprop} {parsed.dgrad} {parsed.wgrad}"
    is_mixed = "e4m3/row" in specs and "nvfp4" in specs
    exact = {name: is_exact(part) and not is_mixed for name, part in results.items()}
    return exact | {"bias": True}


def inputs(
    shape: tuple[int, int], amax: float, dtype: torch.dtype, seed: int, factor: float = 1.0
) -> Callable[[int], Tensor]:
    return lambda s: (planted(shape, amax, seed + s) * factor).to(dtype)


# ---- linear layers -------------------------------------------------------------------------------


def linears(device: torch.device) -> Iterator[Case]:
    """Trains a layer of each recipe, in two sizes and dtypes."""
    for (name, recipe), size, dtype in product(every_spec().items(), (WHOLE, RAGGED), DTYPES):
        m, k, n = size
        layer = mf.Linear(
            k, n, size == WHOLE, device, DTYPES[dtype], recipe=recipe, name="blocks.0.wq", seed=SEED
        )
        amax = amax_of(recipe)
        x = inputs((m, k), amax, DTYPES[dtype], 1)
        g = inputs((m, n), amax, DTYPES[dtype], 50)
        line = train(layer, x, g, amax, exact_results(recipe))
        yield f"linear {name} {m}x{k}x{n} {dtype}", line.text()
    for name, recipe in every_spec().items():
        yield f"linear {name} outliers", of_outliers(recipe, device).text()


def of_outliers(recipe: str, device: torch.device) -> Line:
    """Multiplies operands whose scales tell each rule from others: of tensors, rows, blocks."""
    line, stripes = Line(), (("Ab", "Ba"), ("Bb", "Aa"), ("Aa", "Bb"))
    if not is_exact(mf.Recipe(recipe).wgrad):  # a transform would spread rows, which then cancel
        stripes = (("A", "B"), stripes[1], ("A", "B"))
    x, w, g = (
        outliers((272, 272), *letters, seed).bfloat16().to(device)
        for seed, letters in enumerate(stripes)
    )
    leaves = [t.requires_grad_() for t in (x, w)]
    y = mf.linear(*leaves, recipe=recipe, **state_of(recipe, (6, 4), 0, device))
    y.backward(g)
    for name, t in (("y", y), ("x", x.grad), ("w", w.grad)):
        line.add(name, t[16:, 16:])
    return line


def options(device: torch.device) -> Iterator[Case]:
    """Converts a model of two layers: names, seeds, ranks, and each option of mf.quantize_."""
    choices: dict[str, dict[str, Any]] = {
        "plain": {},
        "seed": {"seed": -3, "data_parallel_rank": 2},
        "recompute": {"recompute": "weight"},
        "main_grad": {"accumulate": "main_grad"},
        "grad": {"accumulate": "grad"},
        "primary": {"primary": True},
        "history": {"delayed_scaling": mf.nn.DelayedScaling(2, "most_recent", 1)},
        "microbatches": {},
    }
    for recipe, (option, given) in product(mf.presets(), choices.items()):
        parsed = mf.Recipe(recipe)
        needs = {"history": parsed.is_delayed, "seed": parsed.is_stochastic}
        if not needs.get(option, True) or recipe == "bf16":
            continue
        if option == "primary" and not reads_primary(parsed):
            continue
        dtype = torch.float32 if option == "grad" else torch.bfloat16
        shapes = nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 48, bias=False)
        model = nn.Sequential(*shapes).to(device, dtype)
        amax = amax_of(recipe)
        fill(model, amax, 5)
        mf.quantize_(model, recipe, keep="nothing", **given)
        if option == "main_grad":
            for p in model.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        x, g = inputs((64, 128), amax, dtype, 1), inputs((64, 48), amax, dtype, 50)
        count = 2 if option in ("microbatches", "grad", "main_grad") else 1
        yield f"model {recipe} {option}", train(model, x, g, amax, {}, microbatches=count).text()


def reads_primary(recipe: mf.Recipe) -> bool:
    specs = recipe.fprop.b, recipe.dgrad.b
    return not any(
        Spec.parse(s).is_bf16 or Spec.parse(s).is_stochastic or Spec.parse(s).is_delayed
        for s in specs
    )


def functions(device: torch.device) -> Iterator[Case]:
    """Calls linear_group, scaled_mm, scaled_grouped_mm with states of the caller."""
    for name, recipe in every_spec().items():
        amax = amax_of(recipe)
        exact, line = exact_results(recipe), Line()
        x = planted((64, 128), amax, 1).bfloat16().to(device).requires_grad_()
        weights = [planted((n, 128), amax, n).bfloat16().to(device) for n in (64, 32)]
        leaves = [w.requires_grad_() for w in weights]
        states = [state_of(recipe, (6, 4), i, device) for i in range(2)]
        listed = {key: [state[key] for state in states] for key in states[0]}
        results = mf.functional.linear_group(x, weights, recipe=recipe, **listed)
        torch.autograd.backward(results, [planted(y.shape, amax, 9).to(y) for y in results])
        for y in results:
            line.add("y", y, exact["y"])
        line.add("x", x.grad)  # a sum of two products, each rounded to bf16
        for w in leaves:
            line.add("w", w.grad, exact["weight"])
        line.exact += listed.get("amax_history", [])
        yield f"linear_group {name}", line.text()
        blocks = [Spec.parse(s).block for part in products_of(recipe) for s in (part.a, part.b)]
        if not any(rows > 1 for rows, _ in blocks[0::2]) and blocks[5][0] <= 1:
            yield f"scaled_grouped_mm {name}", grouped(recipe, device).text()


def products_of(recipe: str) -> tuple[mf.recipe.Product, ...]:
    parsed = mf.Recipe(recipe)
    return parsed.fprop, parsed.dgrad, parsed.wgrad


def state_of(
    recipe: str, shape: tuple[int, ...], i: int, device: torch.device
) -> dict[str, Tensor]:
    parsed, state = mf.Recipe(recipe), {}
    if parsed.is_stochastic:
        state["rng"] = torch.tensor([7 + i, 3, -5], device=device)
    if parsed.is_delayed:
        state["amax_history"] = torch.full(shape, 7.0, device=device)
    return state


def grouped(recipe: str, device: torch.device) -> Line:
    """Multiplies four groups, one of them empty, and rows past the last."""
    line, amax, exact = Line(), amax_of(recipe), exact_results(recipe)
    offs = torch.tensor([16, 16, 48, 80]).int().to(device)
    ids = (hashed(96, 8) % 999 * 100 + torch.arange(96)).int().to(device)
    for first, given in ((0, None), (3, ids)):
        a = planted((96, 128), amax, 1).bfloat16().to(device).requires_grad_()
        w = planted((4, 64, 128), amax, 2).bfloat16().to(device).requires_grad_()
        bias = integers(-4, 4, (4, 64), 3).bfloat16().to(device).requires_grad_()
        state = state_of(recipe, (6, 4, 4), first, device)
        y = mf.functional.scaled_grouped_mm(
            a, w.mT, offs, recipe, bias=bias, row_ids=given, first_expert=first, **state
        )
        y.backward(planted(y.shape, amax, 4).to(y))
        line.add("y", y, exact["y"])
        line.add("a", a.grad, exact["x"])
        line.add("w", w.grad, exact["weight"])
        line.add("b", bias.grad, True)
        line.exact += [state["amax_history"]] if "amax_history" in state else []
    return line


# ---- feed-forwards -------------------------------------------------------------------------------


def mlps(device: torch.device) -> Iterator[Case]:
    """Trains mf.MLP. Under MS-EDEN the gradient of h is no exact sum, and would be cast again."""
    kinds = (("silu", True), ("gelu", False), ("gelu_tanh", True))
    for (name, recipe), (activation, gated) in product(every_spec().items(), kinds):
        if name in ("bf16", "eden") or (activation != "silu" and name not in mf.presets()):
            continue
        for recompute in (None, "weight") if name in mf.presets() else (None,):
            mlp = mf.MLP(DIM, HIDDEN, gated=gated, activation=activation, bias=not gated)
            mlp = mlp.to(device, torch.bfloat16)
            mf.quantize_(mlp, recipe, keep="nothing", recompute=recompute, seed=SEED)
            amax = amax_of(recipe)
            x = inputs((64, DIM), amax, torch.bfloat16, 1, 1 / 64)
            g = inputs((64, DIM), amax, torch.bfloat16, 50)
            line = train(mlp, x, g, amax, {"bias": False})
            yield f"mlp {name} {activation} recompute={recompute}", line.text()


def experts(device: torch.device) -> Iterator[Case]:
    """Trains mf.MoE: its routes are exact, since logits are 128, 0 and -128, of one expert each.

    Softmax would make the second's score 0, as those of the others, and devices break such ties
    differently.
    """
    forms: dict[str, dict[str, Any]] = {
        "shared": {"shared_experts": 1},
        "fused": {"fused_w13": True, "bias": True},
        "limit": {"limit": 8.0, "balance": None},
    }
    for name, (form, options_) in product(mf.presets(), forms.items()):
        if name == "bf16" or (form == "shared" and mf.Recipe(name).is_delayed):
            continue
        moe = mf.MoE(DIM, HIDDEN, EXPERTS, 2, dtype=torch.bfloat16, device=device, **options_)
        mf.quantize_(moe, name, keep="nothing", seed=SEED)
        yield f"moe {name} {form}", train(*moe_arguments(moe, name)).text()
    for name in mf.presets():
        yield f"grouped_mlp {name}", grouped_mlp(name, device).text()


def grouped_mlp(recipe: str, device: torch.device) -> Line:
    """Calls mf.grouped_mlp with the caller's states, tokens' numbers and first expert."""
    line, amax, at = Line(), amax_of(recipe), torch.arange(TOKENS)
    tokens = planted((TOKENS, DIM), amax, 1) / 64
    x = tokens.bfloat16().to(device).requires_grad_()
    matrices = [
        planted(shape, amax, i).bfloat16().to(device).requires_grad_()
        for i, shape in enumerate([(EXPERTS, 2 * HIDDEN, DIM), (EXPERTS, DIM, HIDDEN)])
    ]
    indices = torch.stack([at % 3, (at + 1 + at % 2) % 4], 1).to(device)
    weights = (integers(1, 8, (TOKENS, 2), 4) / 8).to(device).requires_grad_()
    ids = (hashed(TOKENS, 8) % 999 * 100 + at).to(device)
    states = [state_of(recipe, (6, EXPERTS, 4), 0, device) for _ in matrices]
    state = dict(states[0])
    if "amax_history" in state:
        state["amax_history"] = [each["amax_history"] for each in states]
    y = mf.grouped_mlp(
        x,
        *matrices,
        indices,
        weights,
        recipe,
        limit=8.0,
        interleaved=True,
        token_ids=ids,
        first_expert=3,
        **state,
    )
    y.backward(planted(y.shape, amax, 5).to(y))
    named = {"y": y, "x": x.grad, "w13": matrices[0].grad, "w2": matrices[1].grad}
    for name, t in (named | {"weights": weights.grad}).items():
        line.add(name, t)
    line.exact += state.get("amax_history", [])
    return line


def moe_arguments(moe: mf.MoE, recipe: str) -> tuple[Any, ...]:
    """Writes the router's weight; returns the arguments of train."""
    amax, at = amax_of(recipe), torch.arange(TOKENS)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:, :EXPERTS].fill_diagonal_(32.0 * 64)

    def x(s: int) -> Tensor:
        made = planted((TOKENS, DIM), amax, 1 + s)
        made[:, 15] = amax
        made[:, :EXPERTS] = -4
        made[at, (at * 3 + s) % 3] = 4  # the last expert is never first
        made[at, ((at * 3 + s) % 3 + 1 - (at + s) % 2 * 2) % EXPERTS] = 0
        return (made / 64).bfloat16()

    g = inputs((TOKENS, DIM), amax, torch.bfloat16, 50)
    return moe, x, g, amax, {}
