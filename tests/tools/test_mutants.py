"""The list of small mistakes that `tools/mutants.py` makes: each still fits the code, and the tests
that it runs are there.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402


@pytest.mark.parametrize("mutant", mutants.read_table(), ids=lambda m: m.line)
def test_every_mutant_of_the_table_fits_the_tree(mutant):
    source = (ROOT / mutant.file).read_text()
    assert mutant.apply(source) != source


def test_the_table_has_the_mutants_that_proofs_compare():
    kinds = [mutant.kind for mutant in mutants.read_table()]
    assert kinds.count("core") >= 40
    assert kinds.count("layers") >= 20
    assert kinds.count("python") >= 60
    assert len(set(mutants.read_table())) == len(kinds)


@pytest.mark.parametrize("text", ["kMax", "no such text"])
def test_a_text_that_is_not_found_exactly_once_is_an_error(text):
    source = (ROOT / mutants.CORE / "format.h").read_text()
    with pytest.raises(ValueError, match=r"once in .*, found "):
        mutants.Mutant(mutants.CORE + "format.h", text, "x").apply(source)


@pytest.mark.parametrize("line", ["a.h: one", "a.h: one => one", "a.h => one"])
def test_a_line_that_changes_nothing_is_an_error(tmp_path, line):
    (tmp_path / "table.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match="expected 'file: text => another text'"):
        mutants.read_table(tmp_path / "table.txt")


def test_the_tests_that_it_runs_exist():
    for name in (*mutants.LAYER_TESTS, *mutants.FIRST_TESTS.values()):
        assert (ROOT / name).is_file(), name
    for name in mutants.PYTHON_TESTS:
        for test in mutants.tests_of(f"{mutants.PACKAGE}{name}"):
            assert (ROOT / test).exists(), test
    suites = mutants.suites_of(ROOT / mutants.CORE / "activation.h", ROOT)
    assert suites[0] == "core_activation_test"
    assert suites.index("core_swiglu_test") < suites.index("cpu_quantize_test")
    assert "core_philox_test" not in suites  # it does not include activation.h
