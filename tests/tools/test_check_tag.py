"""The check of a release's tag."""

import subprocess
import sys
from pathlib import Path

import minifloat as mf
import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        ("v1.2.3", "# Changelog\n\n## 1.2.3 - 2026-12-31\n\n## 1.2.2 - unreleased\n", ""),
        ("1.2.3", "## 1.2.3 - 2026-12-31\n", "expected the tag v1.2.3"),
        ("v1.2", "## 1.2.3 - 2026-12-31\n", "expected the tag v1.2.3"),
        ("v1.2.3", "## 1.2.3 - unreleased\n", "expected the first heading"),
        ("v1.2.3", "## 1.2.30 - 2026-12-31\n", "expected the first heading"),
        ("v1.2.3", "# Changelog\n", "got 'none'"),
    ],
)
def test_a_release_has_its_version_in_the_tag_and_in_the_changelog(
    tag, changelog, problem, monkeypatch
):
    monkeypatch.syspath_prepend(TOOLS)
    from check_tag import find_problems

    found = list(find_problems(tag, "1.2.3", changelog))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_the_command_compares_with_this_project():
    command = [sys.executable, TOOLS / "check_tag.py", "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"expected the tag v{mf.__version__}" in done.stderr
