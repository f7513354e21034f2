"""Check the pages: links have targets, commands exist, and lines end at 100 columns.

usage: check_docs.py [--self-test]

Reads the Markdown files at the root, under docs/ and under research/. A link [text](path#heading)
is right when the path exists and, where it names a heading of a Markdown file, that heading exists
too. A line may be longer than 100 columns in a table, and where a link or an address makes it long.
No line within a paragraph begins as "1. " or "+ ": Markdown would begin a list there. A row of a
table is one line.

A command stands in a block or between backticks. It is right when what it names exists: targets and
variables of the Makefile, presets of CMake, files of the tree, subcommands of `minifloat`, options
of `minifloat` and of scripts. Words with $, * or … are not compared.

CONTRIBUTING.md is the map of the tree: each folder that holds sources is named there, as `tools/`,
and each path that stands there exists.

Comments of C++ and CUDA sources end at 100 columns too: clang-format does not break them. Those of
Python are ruff's.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100
MAP = "CONTRIBUTING.md"
SOURCE_FOLDERS = {"include", "src", "torch", "python/minifloat", "tests"}
SOURCE_FOLDERS |= {"benchmarks", "examples", "tools", "cmake"}
SOURCE_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".py", ".cmake"}
CXX_FOLDERS = ("include", "src", "torch", "tests", "benchmarks", "examples")
CXX_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
SKIPPED = {"__pycache__", "lib"}

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^ *(```|~~~)(\S*)[^\n]*\n(.*?)^ *\1\s*$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]+`")
# An image, the target of a link but not its text, an address.
UNBREAKABLE = re.compile(r"!\[[^\]]*\]\([^)\s]+\)|\]\([^)\s]+\)|\w+://\S+")

# A row of a table that is not whole.
ROW = re.compile(r"^ *\| .*[^|\s] *$", re.MULTILINE)
# The line after a line of prose, where that would begin a list.
CUT = re.compile(r"^(?! *(?:[-*|>#]|\d+[.)] )).*\S.*\n *((?:1[.)]|\+) .*)$", re.MULTILINE)


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


def find_long_comments(text: str) -> Iterator[tuple[int, int]]:
    """Yield the number and the columns of each line of C++ whose comment makes it too long."""
    for number, line in enumerate(text.split("\n"), start=1):
        is_comment = "//" in line or line.lstrip().startswith(("/*", "*"))
        if is_comment and len(UNBREAKABLE.sub("", line)) > COLUMNS:
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


# ---- The map -------------------------------------------------------------------------------------
def read_source_folders() -> set[str]:
    """Return the folders that hold sources, with a slash at the end, relative to the root."""
    found = set()
    for top in SOURCE_FOLDERS:
        for file in (ROOT / top).rglob("*"):
            folder = file.parent.relative_to(ROOT)
            if file.suffix in SOURCE_SUFFIXES and not SKIPPED & set(folder.parts):
                found.add(folder.as_posix() + "/")
    return found


def is_path(name: str) -> bool:
    """Return whether a path exists, written from the root or short, as core/format.h."""
    return any((base / name).exists() for base in (ROOT, ROOT / "include" / "minifloat"))


def find_map_errors(text: str, folders: set[str]) -> Iterator[str]:
    """Yield the folders that the text does not name, and the paths in it that do not exist."""
    named = {span.strip("`") for span in CODE_SPAN.findall(FENCE.sub("", text))}
    for folder in sorted(folders - named):
        yield f"expected a row that names `{folder}`"
    for name in sorted(named):
        is_ours = re.fullmatch(r"\.?[\w.-]+/[\w./-]*", name) and not name.startswith("build/")
        if is_ours and not is_path(name):
            yield f"`{name}` does not exist"


# ---- Commands ------------------------------------------------------------------------------------
SHELL = {"", "sh", "text"}  # languages of blocks that may have commands
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)  # may go on in the next line
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?"
    r"(?:make|minifloat|python3?|pytest|torchrun|cmake|ctest|pip)(?= |$)|\$\w+ "
)
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
ASSIGNMENT = re.compile(r"(\w+)=(\"[^\"]*\"|\S+)")
IN_TREE = re.compile(
    r"(?:benchmarks|cmake|docs|examples|include|python|research|src|tests|tools|torch)/.*"
    r"|requirements.*\.txt"
)


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, without comments and leading assignments."""
    blocks = [code for _, language, code in FENCE.findall(text) if language in SHELL]
    paragraphs = FENCE.sub("", text).split("\n\n")
    spans = [" ".join(span.split()) for part in paragraphs for _, span in SPAN.findall(part)]
    for block in [*blocks, *spans]:
        values: dict[str, str] = {}
        for line in re.sub(r"\\\n\s*", "", block).split("\n"):
            line = line.strip()
            if given := ASSIGNMENT.fullmatch(line):
                values[given[1]] = given[2].strip('"')
            elif PROGRAM.match(line):
                line = Template(line).safe_substitute(values)
                for part in (SUBSTITUTION.sub("$", line), *SUBSTITUTION.findall(line)):
                    yield from split_commands(part)


def split_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line: `a b; c` has two."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in (";", "&&", "|"):
            words.append(word)
        elif words:
            while re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            yield words
            words = []


def find_modules(script: Path) -> set[Path]:
    """Return a script and the modules of its folder that it imports, at any depth."""
    found: set[Path] = set()
    rest = {script}
    while rest:
        found |= rest
        texts = [file.read_text(encoding="utf-8") for file in rest]
        names = {n for text in texts for n in re.findall(r"^(?:import|from) (\w+)", text, re.M)}
        rest = {script.parent / f"{name}.py" for name in names} - found
        rest = {file for file in rest if file.exists()}
    return found


def read_options(files: set[Path]) -> set[str]:
    """Return the options that files define: by name, or for each field of a dataclass."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    fields = re.findall(r"^    (\w+): .* = ", text, re.M) if '"--" + ' in text else []
    named = re.findall(r"\"(--[a-z][\w-]*)\"", text)
    return {"--help", *named, *(f"--{name.replace('_', '-')}" for name in fields)}


def find_absent_options(words: list[str], files: set[Path]) -> Iterator[str]:
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    for option in sorted(used - read_options(files)):
        yield f"expected an option, got {option}"


def find_command_errors(words: list[str]) -> Iterator[str]:
    """Yield a message for each thing that a command names and that does not exist."""
    words = [word for word in words if not re.search(r"[$*…<\[]", word)]
    for word in words:
        if IN_TREE.fullmatch(word) and not (ROOT / word.split("::")[0]).exists():
            yield f"expected a file, got {word}"
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    program = Path(words[0]).name  # .venv/bin/pytest
    module = words.index("-m") + 1 if program != "pytest" and "-m" in words else 0
    if program == "make":
        yield from find_make_errors(words[1:])
    elif words[module] == "minifloat":
        yield from find_minifloat_errors(words[module + 1 :])
    elif scripts and program != "pytest" and (script := ROOT / words[scripts[0]]).exists():
        yield from find_absent_options(words[scripts[0] + 1 :], find_modules(script))
    elif "--preset" in words:
        name = words[words.index("--preset") + 1]
        if f'"name": "{name}"' not in (ROOT / "CMakePresets.json").read_text(encoding="utf-8"):
            yield f"expected a preset of CMakePresets.json, got {name}"


def find_make_errors(words: list[str]) -> Iterator[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = " ".join(re.findall(r"^([a-z][\w .-]*):(?!=)", text, re.M)).split()
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals and name not in targets:
            yield f"expected a target of the Makefile, got {name}"
        elif equals and not re.search(rf"\$[({{]?{name}\b", text):
            yield f"expected a variable of the Makefile, got {name}"


def find_minifloat_errors(words: list[str]) -> Iterator[str]:
    package = ROOT / "python" / "minifloat"
    text = (package / "cli.py").read_text(encoding="utf-8")
    commands = re.findall(r"^def add_(\w+)\(subparsers", text, re.M)
    if words and not words[0].startswith("--") and words[0] not in [*commands, "COMMAND"]:
        yield f"expected a command of minifloat, got {words[0]}"
    yield from find_absent_options(words, {package / "cli.py"})


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
# (pattern, text of a page, the lines that a wrap has cut)
CUT_CASES: tuple[tuple[re.Pattern[str], str, int], ...] = (
    (CUT, "clipped to\n1. The head", 1),
    (CUT, "  of an item\n  + 2", 1),
    (CUT, "clipped to\n1.5 or\n2. The head", 0),
    (CUT, "steps:\n\n1. one\n2. two", 0),
    (CUT, "- an item\n1. another list", 0),
    (ROW, "| a | b\nc |", 1),
    (ROW, "| a | b |\n|---|---|", 0),
    (ROW, "|x| is a magnitude", 0),
)
# (C++, its long comments)
COMMENT_CASES: tuple[tuple[str, int], ...] = (
    ("// " + "x" * 97, 0),
    ("// " + "x" * 98, 1),
    ("int x;  // " + WORDS, 1),
    ("/*\n * " + WORDS + "\n */", 1),
    ("// https://example.org/" + "a" * 100, 0),
    ('f("' + "x" * 120 + '");', 0),
)
# (text of a map, its errors, where tools/ and cmake/ hold sources).
MAP_CASES: tuple[tuple[str, int], ...] = (
    ("`tools/` and `cmake/`", 0),
    ("`tools/`", 1),
    ("```\n`tools/` `cmake/`\n```", 2),
    ("`tools/`, `cmake/`, `tools/check_docs.py`, `core/format.h`, `tests/*/a.cpp`", 0),
    ("`tools/`, `cmake/`, `tools/no_such_file.py`", 1),
    ("`tools/`, `cmake/`, `no_such_folder/`", 1),
    ("`tools/`, `cmake/`, `make test`, `-DA=b/c`, `build/a.png`", 0),
)
# (text of a page, its commands, their errors)
COMMAND_CASES: tuple[tuple[str, int, int], ...] = (
    ("`make lint` and `make\ntest-all TEST_PROCESSES=2`", 2, 0),
    ("`make no-such-target`", 1, 1),
    ("`make test NO_SUCH_VARIABLE=1`", 1, 1),
    ("`make`", 1, 0),
    ("```\nA=1 make lint; make no-such-target   # make nothing\n```", 2, 1),
    ("- a\n  ```sh\n  make no-such-target && make lint\n  ```", 2, 1),
    ("```python\nmake lint\n```", 0, 0),
    ("`cmake -S examples -DA=$(python -m minifloat --cmake-prefix)`", 2, 0),
    ("`python tools/check_docs.py --self-test`", 1, 0),
    ("`python tools/check_docs.py --no-such-option`", 1, 1),
    ("`python tools/no_such_file.py`", 1, 1),
    ('```\nrun="python benchmarks/scale.py"\n$run --gpus 8 \\\n  --no-such-option\n```', 1, 1),
    ("`pytest tests/test_cli.py -k word`", 1, 0),
    ("`pytest tests/no_such_file.py`", 1, 1),
    ("`minifloat doctor --gpu`", 1, 0),
    ("`.venv/bin/python -m minifloat doctor --no-such-option`", 1, 1),
    ("`minifloat no_such_command`", 1, 1),
    ("`minifloat: expected a recipe`", 0, 0),
    ("`cmake --preset default`", 1, 0),
    ("`cmake --preset no_such_preset`", 1, 1),
)


def self_test() -> int:
    failures = 0
    for text, expected in CASES:
        found = list(find_long_lines(text))
        if len(found) != expected:
            failures += 1
            print(f"{text!r}: expected {expected} long lines, found {found}")
    for pattern, text, expected in CUT_CASES:
        if len(found := pattern.findall(text)) != expected:
            failures += 1
            print(f"{text!r}: expected {expected} lines that are cut, found {found}")
    for text, expected in COMMENT_CASES:
        found = list(find_long_comments(text))
        if len(found) != expected:
            failures += 1
            print(f"{text!r}: expected {expected} long comments, found {found}")
    for text, expected in MAP_CASES:
        errors = list(find_map_errors(text, {"tools/", "cmake/"}))
        if len(errors) != expected:
            failures += 1
            print(f"{text!r}: expected {expected} errors, found {errors}")
    for text, count, expected in COMMAND_CASES:
        commands = list(find_commands(text))
        errors = [error for words in commands for error in find_command_errors(words)]
        if (len(commands), len(errors)) != (count, expected):
            failures += 1
            print(f"{text!r}: expected {count} commands, {expected} errors: {commands}, {errors}")
    cases = sum(map(len, (CASES, CUT_CASES, COMMENT_CASES, MAP_CASES, COMMAND_CASES)))
    print(f"check_docs: self-test: {cases - failures} of {cases} cases right")
    return 1 if failures else 0


# ---- The command ---------------------------------------------------------------------------------
def check_page(page: Path) -> Iterator[str]:
    name = page.relative_to(ROOT)
    for problem in find_broken_links(page):
        yield f"{name}: {problem}"
    text = page.read_text(encoding="utf-8")
    for number, columns in find_long_lines(text):
        yield f"{name}:{number}: expected at most {COLUMNS} columns, it has {columns}"
    prose = FENCE.sub("", text)
    for line in CUT.findall(prose):
        yield f"{name}: expected a paragraph without a list in it, got {line!r}"
    for line in ROW.findall(prose):
        yield f"{name}: expected a row in one line, which ends with |, got {line!r}"
    for words in find_commands(text):
        for problem in find_command_errors(words):
            yield f"{name}: {shlex.join(words)}: {problem}"


def check_comments() -> Iterator[str]:
    for top in CXX_FOLDERS:
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix in CXX_SUFFIXES:
                for number, columns in find_long_comments(file.read_text(encoding="utf-8")):
                    name = file.relative_to(ROOT)
                    yield f"{name}:{number}: expected at most {COLUMNS} columns, it has {columns}"


def check_map() -> Iterator[str]:
    text = (ROOT / MAP).read_text(encoding="utf-8")
    for problem in find_map_errors(text, read_source_folders()):
        yield f"{MAP}: {problem}"


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        sys.exit(__doc__)
    folders = (ROOT / "docs", ROOT / "research")
    pages = [*sorted(ROOT.glob("*.md")), *(p for f in folders for p in sorted(f.rglob("*.md")))]
    problems = [problem for page in pages for problem in check_page(page)]
    problems += [*check_map(), *check_comments()]
    for problem in problems:
        print(problem)
    print(f"check_docs: {len(pages)} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
