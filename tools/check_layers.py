"""Check that the layers of the tree depend on each other one way only.

    python/minifloat -> torch/ -> minifloat -> src/cpu, src/cuda -> include/minifloat/core

usage: check_layers.py [--self-test]

Each rule below is a function from one file, without comments, to its violations. A violation has
the line and the right form. The rules of imports within python/minifloat are in python_layers.py.
The exit status is 1 when any rule is broken.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import python_layers

ROOT = Path(__file__).resolve().parent.parent
CXX_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "Python.h")
CUDA_PREFIXES = ("cuda", "cooperative_groups", "cublas", "nvrtc", "mma.h")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
COMMENT_OR_STRING = re.compile(
    r"""//[^\n]*|/\*.*?\*/"""
    r"""|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*\""""
    r"""|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])'""",
    re.DOTALL,
)


class Source(NamedTuple):
    path: PurePosixPath  # relative to the root of the tree
    code: str  # without comments, and without strings except the names of includes
    lines: list[str]

    def is_under(self, *folders: str) -> bool:
        return any(self.path.is_relative_to(folder) for folder in folders)


class Violation(NamedTuple):
    path: PurePosixPath
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Rule = Callable[[Source], Iterator[Violation]]


# ---- Reading -------------------------------------------------------------------------------------
def strip_cxx(text: str) -> str:
    """Blank out comments and strings, keeping line numbers and include lines."""

    def blank(match: re.Match[str]) -> str:
        found = match.group(0)
        line_start = text.rfind("\n", 0, match.start()) + 1
        if found.startswith('"') and INCLUDE.match(text[line_start : match.end()]):
            return found
        return re.sub(r"[^\n]", " ", found)

    return COMMENT_OR_STRING.sub(blank, text)


def make_source(path: str, text: str) -> Source:
    code = strip_cxx(text) if PurePosixPath(path).suffix in CXX_SUFFIXES else text
    return Source(PurePosixPath(path), code, code.splitlines())


def read_tree() -> Iterator[Source]:
    for folder in ("include", "src", "torch", "python", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CXX_SUFFIXES | {".py"} and path.is_file():
                name = path.relative_to(ROOT).as_posix()
                yield make_source(name, path.read_text(encoding="utf-8"))


def includes(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield (line, '<' or '"', name) of every include of a C++ file."""
    if source.path.suffix in CXX_SUFFIXES:
        for number, line in enumerate(source.lines, start=1):
            if match := INCLUDE.match(line):
                yield number, match.group(1), match.group(2)


def find_word(source: Source, pattern: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every match of `pattern` as a whole token."""
    token = re.compile(rf"(?<![\w.]){pattern}(?![\w])")
    for number, line in enumerate(source.lines, start=1):
        for match in token.finditer(line):
            yield number, match.group(0)


# ---- Rules ---------------------------------------------------------------------------------------
def core_stands_alone(source: Source) -> Iterator[Violation]:
    if not source.is_under("include/minifloat/core"):
        return
    for line, quote, name in includes(source):
        is_std = quote == "<" and "." not in name and "/" not in name
        if not is_std and not name.startswith("minifloat/core/"):
            yield Violation(
                source.path, line, f"core/ includes only core/ and the standard library, not {name}"
            )


def torch_stays_in_torch(source: Source) -> Iterator[Violation]:
    if source.is_under("torch", "tests/torch", "examples", "benchmarks"):
        return
    if source.path == PurePosixPath("include/minifloat/torch.h"):
        return
    for line, _, name in includes(source):
        if name.startswith(TORCH_PREFIXES):
            yield Violation(
                source.path,
                line,
                f"torch's headers belong under torch/ and in include/minifloat/torch.h, not {name}",
            )
        elif name == "minifloat/torch.h" and not source.is_under("tests"):
            yield Violation(source.path, line, "only torch/ and examples include minifloat/torch.h")


def public_headers_stand_below_sources(source: Source) -> Iterator[Violation]:
    if not source.is_under("include"):
        return
    for line, quote, name in includes(source):
        if quote == '"' and not name.startswith("minifloat/"):
            yield Violation(
                source.path,
                line,
                f'public headers include "minifloat/..." in full, not {name}',
            )


def backends_stay_apart(source: Source) -> Iterator[Violation]:
    for own, other in (("src/cpu", "cuda/"), ("src/cuda", "cpu/")):
        if source.is_under(own):
            for line, quote, name in includes(source):
                if quote == '"' and (name.startswith(other) or f"../{other}" in name):
                    yield Violation(
                        source.path, line, f"one backend does not include another's {name}"
                    )


def cuda_headers_stay_in_cuda(source: Source) -> Iterator[Violation]:
    if source.is_under("src/cuda", "torch", "tests", "benchmarks", "examples"):
        return
    for line, quote, name in includes(source):
        if (quote == "<" and name.startswith(CUDA_PREFIXES)) or name.endswith(".cuh"):
            yield Violation(source.path, line, f"CUDA's headers belong in src/cuda, not {name}")


def asm_stays_in_ptx(source: Source) -> Iterator[Violation]:
    if source.path.suffix in CXX_SUFFIXES and source.path.as_posix() != "src/cuda/common/ptx.cuh":
        for line, _ in find_word(source, r"(?:__asm__|__asm|asm)"):
            yield Violation(source.path, line, "asm belongs in src/cuda/common/ptx.cuh only")


def format_constants_have_one_home(source: Source) -> Iterator[Violation]:
    if not source.is_under("include", "src", "torch", "python/minifloat"):
        return
    if source.path.as_posix() == "include/minifloat/core/format.h":
        return
    for line, found in find_word(source, r"(?:448|57'?344|57_344)(?:\.\d*)?[fFuUlL]*"):
        yield Violation(
            source.path, line, f"{found} is a format's maximum: say Format::kMax of core/format.h"
        )


def package_does_not_know_its_users(source: Source) -> Iterator[Violation]:
    if not source.is_under("python/minifloat"):
        return
    users = re.compile(r"^\s*(?:from|import)\s+(tests|benchmarks|examples|tools|conftest|pytest)\b")
    for number, line in enumerate(source.lines, start=1):
        if match := users.match(line):
            yield Violation(
                source.path, number, f"python/minifloat does not import {match.group(1)}"
            )


RULES: tuple[Rule, ...] = (
    core_stands_alone,
    torch_stays_in_torch,
    public_headers_stand_below_sources,
    backends_stay_apart,
    cuda_headers_stay_in_cuda,
    asm_stays_in_ptx,
    format_constants_have_one_home,
    package_does_not_know_its_users,
)


def check(source: Source) -> list[Violation]:
    return [violation for rule in RULES for violation in rule(source)]


# ---- Self-test -----------------------------------------------------------------------------------
# (path, text, number of violations): each rule broken once, and each look-alike let through.
CASES: tuple[tuple[str, str, int], ...] = (
    ("include/minifloat/core/a.h", "#include <cstdint>\n", 0),
    ("include/minifloat/core/a.h", '#include "minifloat/core/format.h"\n', 0),
    ("include/minifloat/core/a.h", '#include "minifloat/spec.h"\n', 1),
    ("include/minifloat/core/a.h", "#include <immintrin.h>\n", 1),
    ("include/minifloat/core/a.h", '// #include "minifloat/spec.h"\n', 0),
    ("include/minifloat/core/a.h", "#include <cuda_bf16.h>\n", 2),
    ("include/minifloat/spec.h", "#include <ATen/ATen.h>\n", 1),
    ("include/minifloat/spec.h", '#include "cpu/loops.h"\n', 1),
    ("include/minifloat/spec.h", '#include "minifloat/torch.h"\n', 1),
    ("include/minifloat/torch.h", "#include <ATen/ATen.h>\n", 0),
    ("src/cpu/a.cpp", "#include <c10/util/Half.h>\n", 1),
    ("src/cpu/a.cpp", '#include "../cuda/launch.h"\n', 1),
    ("src/cpu/a.cpp", "#include <immintrin.h>\n", 0),
    ("src/cuda/a.cu", '#include "cpu/loops.h"\n', 1),
    ("src/cuda/a.cu", 'asm volatile("nop;");\n', 1),
    ("src/cuda/common/ptx.cuh", 'asm volatile("nop;");\n', 0),
    ("src/spec.cpp", 'auto s = "asm 448"; /* asm\n448 */ int asmx;\n', 0),
    ("src/spec.cpp", "if (c == '\"') return 448; char d = '\"';\n", 1),
    ("src/spec.cpp", "#include <cuda_runtime.h>\n", 1),
    ("src/spec.cpp", "float m = 448.0f;\nfloat n = 57344;\n", 2),
    ("src/spec.cpp", "int k = 4480, j = 0x448, i = x448;\n", 0),
    ("include/minifloat/core/format.h", "constexpr float kMax = 448.0f;\n", 0),
    ("tests/core/a_test.cpp", "EXPECT_EQ(x, 448.0f);\n", 0),
    ("torch/ops.cpp", "#include <torch/library.h>\n", 0),
    ("tests/torch/a_test.cpp", "#include <torch/torch.h>\n", 0),
    ("tests/cpu/a_test.cpp", "#include <torch/torch.h>\n", 1),
    ("python/minifloat/a.py", "from tests.python import oracle\n", 1),
    ("python/minifloat/a.py", "import torch\nM = 448\n", 1),
)


def self_test() -> int:
    failures = 0
    for path, text, expected in CASES:
        found = check(make_source(path, text))
        if len(found) != expected:
            failures += 1
            print(f"{path}: {text!r}: expected {expected} violations, found {len(found)}: {found}")
    right, cases = python_layers.self_test()
    right, cases = right + len(CASES) - failures, cases + len(CASES)
    print(f"check_layers: self-test: {right} of {cases} cases right")
    return 0 if right == cases else 1


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        sys.exit(__doc__)
    sources = list(read_tree())
    violations = [violation for source in sources for violation in check(source)]
    package = {s.path: s.code for s in sources if s.is_under("python/minifloat")}
    violations += [Violation(*broken) for broken in python_layers.check(package)]
    for violation in violations:
        print(violation)
    print(f"check_layers: {len(sources)} files, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
