"""The net below changes of code: no byte may change that a user of the library can see.

The golden files hold digests of casts of every spec, of layers under every recipe over several
steps, and of what ranks send. They were made once, and each commit reproduces them, here on a CPU
and in tests/gpu/test_golden.py on a GPU. A refactoring keeps them; a change of numerics renews them
(`python -m tests.golden.renew`), and its commit says why. The cases call public functions, and ops
where no function leads to the bytes. They judge no numerics: the oracles of tests/core do that.

Cases run over the library's own tables, so that a new spec, preset or transform has no line, and
fails. The tests below name what no table lists.
"""

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.spec import Spec

from tests.golden import golden, tables

CPU = torch.device("cpu")
MOST_BYTES = 300_000  # of all files, which are read in diffs


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_bytes_are_those_of_the_golden_file(family):
    golden.require_golden(family, CPU)


def names_of(family):
    return golden.read(family).keys()


def test_every_entry_of_the_tables_has_cases():
    """Reads the files: a table that a case generator no longer visits fails too."""
    casts, layers = names_of("casts"), names_of("layers")
    for spec in tables.specs():
        for side in ("row", "col"):
            assert {f"quantize {spec} {side} {dtype}" for dtype in ("fp32", "bf16")} <= casts, spec
            if Spec.parse(spec).is_stochastic:
                assert f"positions {spec} {side}" in casts
            if Spec.parse(spec).amax_of and spec in tables.few_specs():
                assert f"given {spec} {side}" in casts
    for spec in tables.few_specs():
        assert f"dequantize {spec}" in casts
        if Spec.parse(spec).block[0] <= 1:
            assert {f"groups {spec} row", f"groups {spec} col"} <= casts
    flags = {f for spec in tables.specs() for f in spec.split("+")[1:]}
    assert flags == set(tables.flags())
    assert {spec.split("+")[0] for spec in tables.specs()} == set(tables.bases())
    for preset in mf.presets():
        assert f"linear {preset} outliers" in layers
        assert f"linear_group {preset}" in layers
        if preset != "bf16":
            assert f"model {preset} plain" in layers
            assert f"mlp {preset} silu recompute=None" in layers
            assert {f"moe {preset} fused", f"moe {preset} limit"} <= layers


def test_every_message_of_gradients_has_a_case():
    for spec in ("bf16", *tables.specs()):
        try:
            ops.message_bytes(spec, 128)
        except ValueError:
            continue
        assert f"message {spec}" in names_of("wires")


def test_files_are_small_and_sorted():
    for family in golden.FAMILIES:
        lines = golden.path_of(family).read_text().splitlines()
        assert lines == sorted(lines), family
    assert sum(golden.path_of(family).stat().st_size for family in golden.FAMILIES) < MOST_BYTES
