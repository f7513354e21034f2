"""--help of each script: argparse fills in its texts by %, as %(default)s."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "benchmarks", "examples", "python", "research", "tools"


def help_texts():
    """Yields (place, text) of the help of every argument."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    for keyword in node.keywords:
                        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
                            yield f"{path.relative_to(ROOT)}:{node.lineno}", keyword.value.value


def test_texts_can_be_filled_in():
    found = dict(help_texts())
    assert len(found) > 50
    for place, text in found.items():
        try:
            text % defaultdict(str)
        except ValueError as error:
            raise AssertionError(f"{place}: {text!r}: {error}") from error
