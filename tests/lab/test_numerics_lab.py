"""docs/numerics_lab.md: its code runs as one program, and prints what the page says."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import minifloat as mf
import pytest
import torch

from tests.support.same_bits import require_all_same

PAGE = Path(__file__).parents[2] / "docs" / "numerics_lab.md"
TEXT = PAGE.read_text()
# A block of code, and what it prints right below: a block without a language, or a table.
PART = re.compile(r"^```python\n(.*?)^```\n+(?:```\n(.*?)^```$|((?:^\|[^\n]*\n)+))?", re.M | re.S)
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?")
# Of a loss after training: one rounding that differs moves all later steps. Targets that differ by
# 1e-7 of themselves moved the losses of the page by up to 0.16 of themselves.
TRAINING = 0.25


def read_parts():
    """Returns the code of each part, and the words that it prints."""
    parts = [(code, (fence or table).split()) for code, fence, table in PART.findall(TEXT)]
    assert len(parts) == TEXT.count("```python\n") > 5
    return parts


def is_same(got, want, share):
    """Compares two words: their numbers within a share, and within one in the last place.

    Vectorised functions and the order of sums differ between processors in the last bits.
    """
    if NUMBER.sub("#", got) != NUMBER.sub("#", want):
        return False
    pairs = zip(NUMBER.findall(got), NUMBER.findall(want))
    return all(abs(float(a) - float(b)) <= share * abs(float(b)) + last_place(b) for a, b in pairs)


def last_place(number):
    """Returns one in the last place of a decimal fraction, and 0 of an integer."""
    digits, _, exponent = number.partition("e")
    places = len(digits.partition(".")[2])
    return 1.01 * 10.0 ** (int(exponent or 0) - places) if places else 0


def run(code, names):
    """Returns what the code prints."""
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(code, str(PAGE), "exec"), names)
    return output.getvalue()


@pytest.fixture
def one_thread(torch_as_it_was):
    torch.set_num_threads(1)  # beside other jobs, several wait for each other
    with torch.random.fork_rng(devices=[]):
        yield


def test_the_page_prints_what_it_says(one_thread):
    names = {}
    for code, want in read_parts():
        output = run(code, names)
        share = TRAINING if "train(rule" in code else 0
        got = output.split()
        assert len(got) == len(want), output
        assert [(a, b) for a, b in zip(got, want) if not is_same(a, b, share)] == [], output


def test_the_comparison_of_numbers():
    assert is_same("21.3", "21.4", 0)
    assert is_same("-1.5e-03", "-1.4e-03", 0)
    assert is_same("tensor([153,", "tensor([153,", 0)
    assert is_same("9.0", "8.0", 0.25)
    for got, want in (("21.2", "21.4"), ("12", "13"), ("-1.4e-02", "-1.4e-03"), ("1.0%", "1.0")):
        assert not is_same(got, want, 0)


def test_the_layer_is_that_of_a_recipe():
    """Bits are equal: sums of E2M1 codes times powers of two, of similar blocks, are exact."""
    names = {}
    for code, _ in read_parts():
        if "import minifloat" in code or "class LabLinear" in code:
            run(code, names)
    layer = names["LabLinear"](64, 32)
    layer.rule = "mxfp4"
    torch.nn.init.zeros_(layer.bias)
    x, g = torch.randn(2, 48, 64, requires_grad=True), torch.randn(2, 48, 32)
    recipe = "fprop=mxfp4*mxfp4 dgrad=mxfp4*mxfp4 wgrad=mxfp4*mxfp4"
    found = []
    for y in (layer(x), mf.linear(x, layer.weight, recipe=recipe)):
        found.append((y.detach(), *torch.autograd.grad(y, (x, layer.weight), g)))
    require_all_same(*found)
