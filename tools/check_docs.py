"""Check that the documentation holds together: every relative link and image leads somewhere.

usage: check_docs.py

Reads the Markdown files at the root and under docs/. A link [text](path#heading) is right when the
path exists and, where it names a heading of a Markdown file, that heading exists too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]+`")


def anchors_of(page: Path) -> set[str]:
    """Anchors as repository hosts make them: lower case, punctuation gone, spaces to hyphens."""
    text = page.read_text(encoding="utf-8")
    anchors = set()
    for title in re.findall(r"^#+\s+(.*?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        anchors.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return anchors


def find_broken_links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(CODE_SPAN.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):  # http:, https:, mailto:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: expected the file {target}, it is not there"
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            yield f"{page.relative_to(ROOT)}: expected the heading #{anchor} in {file.name}"


def main() -> int:
    pages = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
    broken = [problem for page in pages for problem in find_broken_links(page)]
    for problem in broken:
        print(problem)
    print(f"check_docs: {len(pages)} pages, {len(broken)} broken links")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
