"""Check the pages: links have targets, and lines end at 100 columns.

usage: check_docs.py [--self-test]

Reads the Markdown files at the root and under docs/. A link [text](path#heading) is right when the
path exists and, where it names a heading of a Markdown file, that heading exists too. A line may be
longer than 100 columns in a table, and where a link or an address makes it long.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]+`")
# An image, the target of a link but not its text, an address.
UNBREAKABLE = re.compile(r"!\[[^\]]*\]\([^)\s]+\)|\]\([^)\s]+\)|\w+://\S+")


# ---- Lines ---------------------------------------------------------------------------------------
def find_long_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield the number and the columns of each line that is too long and could be broken."""
    in_fence = False
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith(("```", "~~~")):
            in_fence = not in_fence
        is_table = line.lstrip().startswith("|") and not in_fence
        if len(line) > COLUMNS and not is_table and len(UNBREAKABLE.sub("", line)) > COLUMNS:
            yield number, len(line)


# ---- Links ---------------------------------------------------------------------------------------
def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page as hosts make them: lower case, no punctuation, hyphens."""
    text = page.read_text(encoding="utf-8")
    anchors = set()
    for title in re.findall(r"^#+\s+(.*?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        anchors.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return anchors


def find_broken_links(page: Path) -> Iterator[str]:
    """Yield the fault of each link of a page that has no target."""
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(CODE_SPAN.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):  # http:, https:, mailto:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"expected the file {target}, it is not there"
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            yield f"expected the heading #{anchor} in {file.name}"


# ---- Self-test -----------------------------------------------------------------------------------
WORDS = "word " * 30
TARGET = "docs/" + "a" * 100 + ".md"
# (text of a page, its long lines): each exception let through, and each look-alike found.
CASES: tuple[tuple[str, int], ...] = (
    ("x" * 100, 0),
    ("x" * 101, 1),
    ("×" * 100, 0),
    (WORDS, 1),
    (f"| {WORDS} |", 0),
    (f"```\n| {WORDS}\n```", 1),
    (f"```\n{WORDS}\n```", 1),
    (f"see [the page]({TARGET})", 0),
    (f"{WORDS} [the page]({TARGET})", 1),
    (f"![{WORDS}](a.png)", 0),
    (f"[{WORDS}](a.md)", 1),
    ("https://example.org/" + "a" * 100, 0),
    (WORDS + "https://example.org/" + "a" * 100, 1),
    (f"{WORDS}\nshort\n{WORDS}", 2),
)


def self_test() -> int:
    failures = 0
    for text, expected in CASES:
        found = list(find_long_lines(text))
        if len(found) != expected:
            failures += 1
            print(f"{text!r}: expected {expected} long lines, found {found}")
    print(f"check_docs: self-test: {len(CASES) - failures} of {len(CASES)} cases right")
    return 1 if failures else 0


# ---- The command ---------------------------------------------------------------------------------
def check_page(page: Path) -> Iterator[str]:
    name = page.relative_to(ROOT)
    for problem in find_broken_links(page):
        yield f"{name}: {problem}"
    for number, columns in find_long_lines(page.read_text(encoding="utf-8")):
        yield f"{name}:{number}: expected at most {COLUMNS} columns, it has {columns}"


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        sys.exit(__doc__)
    pages = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
    problems = [problem for page in pages for problem in check_page(page)]
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(pages)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
