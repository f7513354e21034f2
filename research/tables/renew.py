"""Write the tables and pictures that are made from results, not typed.

    python research/tables/renew.py    renews README.md, docs/, research/ and docs/images/*.svg

A table stands between two comments, `<!-- renew.py: NAME -->` and `<!-- /renew.py -->`. Run this
after a new file in research/results or research/parity (figures.py), a new preset or a new engine.
tests/tools/test_tables.py fails where a page is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import figures
import measured
import pictures
import recipes

MARKED = re.compile(r"(<!-- renew\.py: ([^>]+) -->\n).*?(<!-- /renew\.py -->)", re.DOTALL)
BEGIN = "<!-- renew.py:"

TABLES: dict[str, Callable[[], str]] = {
    "recipes": recipes.recipes,
    "wishes": recipes.wishes,
    "choice": recipes.choice,
    "speeds": recipes.speeds,
    "peaks": recipes.peaks,
    "predictions": recipes.predictions,
    "engines": recipes.engines,
    "presets": recipes.presets,
    "step": measured.step,
    "step parts": measured.step_parts,
    "layers": measured.layers,
    "layers of w4a8": measured.layers_of_w4a8,
    "small layers": measured.small_layers,
    "few tokens": measured.few_tokens,
    "weight codes": measured.weight_codes,
    "fsdp": measured.fsdp,
    "by the host": measured.by_host,
    "lora": measured.lora,
    "experts": measured.experts,
    "expert layers": measured.expert_layers,
}


def renewed(text: str) -> str:
    """Returns a page with its tables made anew.

    Raises:
        ValueError: a comment begins no table that there is, or none ends it.
    """

    def renew(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"expected one of the tables {', '.join(TABLES)}, got {name!r}")
        return begin + TABLES[name]() + end

    if len(MARKED.findall(text)) != text.count(BEGIN):
        raise ValueError(f"expected <!-- /renew.py --> after each {BEGIN} …")
    return MARKED.sub(renew, text)


def pages() -> Iterator[Path]:
    """Yields the pages that have tables."""
    pages = chain(*(sorted(folder.rglob("*.md")) for folder in (figures.DOCS, figures.RESEARCH)))
    for page in (figures.ROOT / "README.md", *pages):
        if BEGIN in page.read_text(encoding="utf-8"):
            yield page


def files() -> Iterator[tuple[Path, str]]:
    """Yields the files that this script writes, with what they should hold."""
    for page in pages():
        yield page, renewed(page.read_text(encoding="utf-8"))
    for name, draw in pictures.PICTURES.items():
        yield figures.DOCS / "images" / name, draw()


def main() -> int:
    if sys.argv[1:]:
        sys.exit(__doc__)
    for path, text in files():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(figures.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
