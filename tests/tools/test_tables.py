"""The tables and pictures of research/tables are those on the pages, and their words hold."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def renew(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "research" / "tables"))
    return importlib.import_module("renew")


def test_pages_and_pictures_are_up_to_date(renew):
    old = [
        path.relative_to(ROOT).as_posix()
        for path, text in renew.files()
        if path.read_text(encoding="utf-8") != text
    ]
    assert old == [], "run `python research/tables/renew.py`"


def test_each_table_and_picture_is_on_a_page(renew):
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")]
    texts = [path.read_text() for path in [ROOT / "README.md", *pages]]
    named = {found[1] for text in texts for found in renew.MARKED.findall(text)}
    assert named == set(renew.TABLES)
    for picture in renew.pictures.PICTURES:
        assert any(f"images/{picture})" in text for text in texts), picture


def test_each_run_says_what_it_was(renew):
    for path in (ROOT / "research" / "results").glob("*.json"):
        run = renew.figures.read_run(path.stem)
        script = re.search(r"benchmarks/(\w+)\.py", run["command"])[1]
        assert path.stem.startswith(script)  # gpu_blocks_weights is a run of gpu_blocks.py
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", run["date"])


def test_a_comment_without_a_table_is_an_error(renew):
    with pytest.raises(ValueError, match=r"one of the tables recipes, .*, got 'speedz'"):
        renew.renewed("<!-- renew.py: speedz -->\n<!-- /renew.py -->\n")
    with pytest.raises(ValueError, match=r"expected <!-- /renew\.py --> after each"):
        renew.renewed("<!-- renew.py: speeds -->\n\n<!-- renew.py: peaks -->\n<!-- /renew.py -->\n")


def test_the_words_of_the_wishes_hold(renew):
    figures, recipes = renew.figures, renew.recipes
    (_, _, hopper), *_ = recipes.WISHES
    wanted = {wish.purpose.split(",")[0]: wish for wish in hopper}
    steps = {wish.recipe: figures.step_of(wish.recipe) for wish in hopper if not wish.record}
    assert wanted["More speed"].recipe == max(steps, key=lambda name: steps[name]["speed"])
    assert wanted["Least memory"].recipe == min(steps, key=lambda name: steps[name]["peak_gib"])
    fp4 = [c.record for c in recipes.CHOICES if "fp4" in c.recipe]
    assert min(fp4, key=lambda name: figures.gaps()[name].mean) == recipes.THEN
    for choice in recipes.CHOICES:
        if choice.recipe not in ("", "bf16") and choice.is_timed:
            is_native = figures.is_native(choice.recipe, figures.HOPPER)
            assert is_native or figures.step_of(choice.step)["speed"] < 1


def test_bf16_that_ran_first_and_last_counts_once(renew, monkeypatch):
    rows = [
        {"name": "bf16", "ms": 100},
        {"name": "mxfp4", "ms": 50},
        {"name": "bf16 again", "ms": 110},
    ]
    monkeypatch.setattr(renew.figures, "read_run", lambda run: {"rows": rows})
    found = renew.figures.steps_in("gpu_blocks")
    assert [(row["name"], row["ms"]) for row in found] == [("bf16", 105), ("mxfp4", 50)]


def test_a_gap_says_how_many_seeds_it_has(renew):
    gap = renew.figures.Gap
    assert str(gap(-0.016, 0.049, 3)) == "-0.02 ± 0.05%"
    assert str(gap(0.637, None, 1)) == "+0.64% (one seed)"
    assert str(gap(0.12, 0.5, 2)) == "+0.12 ± 0.50% (two seeds)"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
