"""The site's reference: each public name, header and subcommand is there.

`make docs` fails where an entry has no object, and where a page is in no list of pages.
"""

import inspect
import re
from pathlib import Path

import minifloat as mf
from minifloat import cli

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def read_groups_of_table():
    """Returns the names of each row of the API table, by the row's title."""
    table = (REFERENCE / "python.md").read_text().split("## API\n\n")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (.*) \|$", table, re.MULTILINE)[1:]
    return {title: re.findall(r"`(?:mf\.)?(\w+)[^`]*`", names) for title, names in rows}


def read_entries():
    """Returns the (kind, name) of the entries of each group, by the group's title."""
    groups = re.split(r"^## ", (REFERENCE / "python.md").read_text(), flags=re.MULTILINE)[2:]
    entry = re.compile(r"^\.\. auto(\w+):: (\w+)$", re.MULTILINE)
    return {group.split("\n")[0]: entry.findall(group) for group in groups}


def test_each_public_name_has_one_entry_of_its_kind():
    entries = sorted(entry for group in read_entries().values() for entry in group)
    kinds = {name: inspect.isclass(getattr(mf, name)) for name in mf.__all__}
    assert entries == sorted(("class" if kinds[n] else "function", n) for n in kinds)


def test_entries_are_grouped_as_in_the_table():
    entries = {title.lower(): [n for _, n in group] for title, group in read_entries().items()}
    assert entries == {title.lower(): names for title, names in read_groups_of_table().items()}


def test_each_header_is_on_the_page():
    shown = re.findall(
        r"\{literalinclude\} \S+/(\w+\.h)$", (REFERENCE / "cpp.md").read_text(), re.M
    )
    assert sorted(shown) == sorted(p.name for p in (ROOT / "include" / "minifloat").glob("*.h"))


def test_each_subcommand_is_on_the_page():
    shown = re.findall(
        r"\{command-help\} (\w+)$", (REFERENCE / "command_line.md").read_text(), re.M
    )
    added = re.findall(r"^def add_(\w+)\(subparsers", inspect.getsource(cli), re.MULTILINE)
    assert shown == added
