"""The workflows of .github/: each command is a target of the Makefile, so that it runs anywhere.

What a step named "Install …" runs prepares the machine alone, and is not read.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
STEP = re.compile(r"^( *)- (?=\w+:)")
RUN = re.compile(r"^( *)(?:- )?run: *(\S.*)$")  # not the `run:` of defaults


def read_commands(text):
    """Returns the lines of `run:`, of one line or of a block, of all steps but installations."""
    commands, is_installation, block = [], False, None
    for line in text.splitlines():
        if block is not None and (not line.strip() or re.match(" " * (block + 1), line)):
            commands += [line.strip()] if line.strip() and not is_installation else []
            continue
        block = None
        if STEP.match(line):
            is_installation = "name: Install " in line
        if run := RUN.match(line):
            indent, command = len(run[1]), run[2]
            if command in ("|", "|-", ">", ">-"):
                block = indent
            elif not is_installation:
                commands.append(command)
    return commands


def read_targets(makefile):
    """Returns the names of rules, but for special ones and those with a variable for a name."""
    names = re.findall(r"^([a-z][\w .-]*):(?!=)", makefile, re.MULTILINE)
    return {name for line in names for name in line.split()}


def find_faults(commands, targets):
    """Returns the commands that are no `make TARGET` of these targets."""
    calls = {c: re.fullmatch(r"make ([\w.-]+)( [A-Z_]+=\S*)*", c) for c in commands}
    return [c for c, call in calls.items() if call is None or call[1] not in targets]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_a_make_target(workflow):
    commands = read_commands(workflow.read_text())
    assert len(commands) > 0
    assert find_faults(commands, read_targets((ROOT / "Makefile").read_text())) == []


def test_a_change_meets_all_of_ci_run():
    needed = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(needed) > 0
    assert set(needed) <= set(read_commands((ROOT / ".github/workflows/test.yml").read_text()))


MAKEFILE = """
VENV := .venv
.PHONY: build test
build: $(READY)
test slow-test: export A ?= 1
$(READY): pyproject.toml
\techo "other: text"
"""
STEPS = """
jobs:
  one:
    steps:
      - uses: actions/checkout@v1
      - run: make test
      - name: Install what is needed
        run: |
          apt-get install nothing
          make nothing

      - name: Tests
        env:
          A: 1
        run: |
          make build JOBS=2

          make absent
      - if: always()
        run: tools/script.sh
"""


def test_a_target_that_is_absent_and_another_command_are_found():
    targets = read_targets(MAKEFILE)
    assert targets == {"build", "test", "slow-test"}
    commands = read_commands(STEPS)
    assert commands == ["make test", "make build JOBS=2", "make absent", "tools/script.sh"]
    assert find_faults(commands, targets) == ["make absent", "tools/script.sh"]
