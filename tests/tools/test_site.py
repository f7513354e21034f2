"""The site's reference: each public name, header and subcommand is there.

`make docs` fails where an entry has no object, and where a page is in no list of pages.
"""

import inspect
import re
from pathlib import Path

from minifloat import cli

from tests.support.public_names import public_names

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def groups():
    """Returns the text of each group of the page, by the group's title."""
    _, *parts = re.split(r"^## ", (REFERENCE / "python.md").read_text(), flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)


def read_table():
    """Returns the names of each row of the API table, by the row's title."""
    rows = re.findall(r"^\| `?([^|`]+)`? \| (.*) \|$", groups()["API"], re.MULTILINE)[1:]
    return {title: re.findall(r"`(?:mf\.)?([\w.]+)[^`]*`", names) for title, names in rows}


def read_entries():
    """Returns the (kind, name) of the entries of each group, by the group's title."""
    entry = re.compile(r"^\.\. auto(\w+):: ([\w.]+)$", re.MULTILINE)
    return {
        title: [(kind, name.removeprefix("minifloat.")) for kind, name in entry.findall(text)]
        for title, text in groups().items()
        if title not in ("API", "Command line")
    }


def test_each_public_name_has_one_entry_of_its_kind():
    found = []
    for title, entries in read_entries().items():
        prefix = title.removeprefix("mf").lstrip(".") + "." if title.startswith("mf.") else ""
        found += [(kind, prefix + name) for kind, name in entries]
    kinds = {name: inspect.isclass(of) for name, of in public_names().items()}
    assert sorted(found) == sorted(("class" if kinds[n] else "function", n) for n in kinds)


def test_entries_are_grouped_as_in_the_table():
    entries = {title.lower(): [n for _, n in group] for title, group in read_entries().items()}
    assert entries == read_table()


def test_each_header_is_on_the_page():
    shown = re.findall(
        r"\{literalinclude\} \S+/(\w+\.h)$", (REFERENCE / "cpp.md").read_text(), re.M
    )
    assert sorted(shown) == sorted(p.name for p in (ROOT / "include" / "minifloat").glob("*.h"))


def test_each_subcommand_is_on_the_page():
    shown = re.findall(r"\{command-help\} (\w+)$", (REFERENCE / "python.md").read_text(), re.M)
    added = re.findall(r"^def add_(\w+)\(subparsers", inspect.getsource(cli), re.MULTILINE)
    assert shown == added
