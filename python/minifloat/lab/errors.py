"""mf.lab.errors: what casts do to a tensor, in the inspector's numbers.

The numbers of a spec are the op operand_statistics's, which casts x. For a Rule the same vector
has what the op says of x itself, and the error of the rule's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._native import ops
from ..checks import require_bool, require_int
from ..inspector.inspect import length, operand_row, statistics_of_all
from ..inspector.inspection import TITLES, OperandRow, cells_of, markdown
from ..spec import Spec
from .rules import Rule, apply_rule, require_rule, require_values

ANY = "mxfp8"  # a spec without a transform: all say the same of x itself


@dataclass(frozen=True)
class Errors:
    """What mf.lab.errors found: a row a rule.

    Args:
        rows: in the order of the rules, each with `spec`, `elements`, `snr_db`, `saturated`,
            `flushed`, `zero_scales`, `channels`, `outlier_channels`, `nonfinite`, `amax` and
            `scales`, as docs/inspector.md defines them. Of a Rule `saturated` and `zero_scales`
            are NaN and `scales` is empty: its values do not tell them.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> found = mf.lab.errors(torch.randn(128, 128), ["mxfp4", "nvfp4"])
        >>> [(row.spec, f"{row.snr_db:.0f} dB") for row in found.rows]
        [('mxfp4', '19 dB'), ('nvfp4', '20 dB')]
        >>> found.table().splitlines()[0][:40]
        '| spec  |   dB | saturated | flushed to '
    """

    rows: tuple[OperandRow, ...]

    def table(self) -> str:
        """Returns a line a rule, as Markdown. "-": not known."""
        return markdown([TITLES, *map(cells_of, self.rows)])


def errors(
    x: Tensor,
    rules: str | Rule | Iterable[str | Rule],
    *,
    columnwise: bool = False,
    seed: int = 0,
    stream: int = 0,
) -> Errors:
    """Measures what casts do to a tensor: signal to noise, saturation, underflow, scales.

    Args:
        x: (rows, cols) or (batch, rows, cols), float32 or bfloat16, not empty. The matrices of a
            batch are cast one by one, and their numbers are added.
        rules: operand specs, and mf.lab.Rule for rules in Python: one or several.
        columnwise: whether to cast the transpose, with blocks along x's rows.
        seed, stream: of a spec's random bits, as quantize takes them: the same bits are drawn. A
            mf.lab.Rule draws its own.

    Returns:
        A row a rule, in their order. x is compared with its value as it is cast: under `+rht` and
        `+eden`, after the transform.

    Raises:
        TypeError, ValueError: an argument is not as expected, `x` is empty, or `rules` is.

    Source: docs/inspector.md defines the numbers.

    Example:
        >>> found = mf.lab.errors(torch.tensor([[0.1, 0.2, 0.4, 6.0] * 8]), "mxfp4")
        >>> row = found.rows[0]
        >>> row.flushed, row.scales  # 0.1 and 0.2 became 0; the scale is 2^0
        (0.5, {0: 1})
    """
    x = require_values("errors", x).detach()
    if x.numel() == 0:
        raise ValueError(f"errors: expected x with elements, got shape {tuple(x.shape)}")
    each = [rules] if isinstance(rules, str) or not isinstance(rules, Iterable) else list(rules)
    each = [require_rule("errors: rules", rule) for rule in each]
    if not each:
        raise ValueError("errors: rules: expected a spec or a mf.lab.Rule, got none")
    require_bool("errors: columnwise", columnwise)
    require_int("errors: seed", seed)
    require_int("errors: stream", stream)
    rows = []
    for rule in each:
        name = rule.name if isinstance(rule, Rule) else Spec.parse(rule).text
        matrices = x if x.dim() == 3 else x[None]
        # First the memory: an expanded batch may be longer than what a vector each leaves room for.
        found = x.new_empty((len(matrices), length()), dtype=torch.float64)
        for e in range(len(matrices)):
            found[e] = statistics(matrices[e], rule, columnwise, seed, stream, e)
        (numbers,) = statistics_of_all(found.cpu())
        rows.append(operand_row("x", name, numbers))
    return Errors(tuple(rows))


@torch.no_grad()
def statistics(
    x: Tensor, rule: str | Rule, columnwise: bool, seed: int, stream: int, batch_index: int
) -> Tensor:
    """Returns the vector of operand_statistics; of a Rule, NaN for what its values do not tell."""
    if isinstance(rule, str):
        spec = Spec.parse(rule)
        rng = torch.tensor([seed, 0], device=x.device) if spec.is_stochastic else None
        random = {"rng": rng, "stream": stream, "batch_index": batch_index}
        return ops.operand_statistics([x], spec.text, columnwise, **random)[0]
    names = ops.statistic_names()
    found = ops.operand_statistics([x], ANY, columnwise)[0]
    read = (x.mT if columnwise else x).float().contiguous()
    values = apply_rule(read, rule).float().contiguous()
    found[names.index("noise")] = ops.result_error([values], [read])[0, 0]
    found[names.index("flushed")] = ((read != 0) & (values == 0)).sum()
    for unknown in ("saturated", "scales", "zero_scales"):
        found[names.index(unknown)] = math.nan
    found[len(names) :] = 0  # the histogram of scales
    return found
