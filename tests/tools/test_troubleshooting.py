"""docs/troubleshooting.md: each error that names a remedy has an entry, and no entry is stale.

Texts are taken from the sources, with `…` for what a call fills in. A text names a remedy where a
verb of REMEDIES begins a clause, as in "…, got one; use accumulate='grad'". A quote of the page is
the code in a line that begins with `>`. It has all of a text's words, or `…` for some of them.
"""

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
LEAST_WORDS = 4  # of a quote: fewer would match texts of other errors

# What a reader is told to do.
REMEDIES = (
    "add|allocate|apt|ask|assign|begin|build|call|change|check|choose|compile|convert|create|"
    "define|delete|disable|divide|enable|exclude|export|free|gather|give|increase|install|keep|"
    "leave|load|look|lower|make|mend|move|name|pad|pass|pick|pip|put|raise|reduce|register|remove|repeat|"
    "replace|report|restore|run|save|select|set|shard|split|start|switch|take|train|try|turn|"
    "unset|update|upgrade|use|wait|wrap|write"
)
# A clause begins after one of ;:.( and may first say for what it is: "; for a batch, use".
REMEDY = re.compile(
    rf"(?:[;:.] |(?:^|[;:.] |\()(?:for|in|or|to|where|with)\b[^;:.(]*[ ,])"
    rf"`?(?:{REMEDIES})[ `(]|--\w+ goes on",
    re.IGNORECASE,
)


# ---- Python --------------------------------------------------------------------------------------
def text_of(node: ast.expr) -> str:
    """Returns the text of a string's expression, … for any other."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{}", "…")  # of str.format
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def holes_of(node: ast.expr) -> list[ast.AST]:
    """Returns the expressions that are … in the text."""
    if isinstance(node, ast.Constant):
        return []
    if isinstance(node, ast.JoinedStr):
        return [part for part in node.values if not isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return holes_of(node.left) + holes_of(node.right)
    return [*ast.iter_child_nodes(node)]


def read_python(source: str) -> Iterator[str]:
    """Yields each string but docstrings, whole where it is made of several."""
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if isinstance(node, ast.expr):
            yield text_of(node)
            nodes.extend(holes_of(node))
        else:
            nodes.extend(ast.iter_child_nodes(node))


# ---- C++ and CMake -------------------------------------------------------------------------------
CXX = re.compile(
    r"""(?P<skipped>//[^\n]*|/\*.*?\*/|^\#[^\n]*|\s+)
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |(?P<other>'(?:[^'\\\n]|\\.)'|\d[\w'.]*|\w+|.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def read_cxx(source: str) -> Iterator[str]:
    """Yields the strings of each statement as one text, … for what stands between them.

    "a ", x, " b" and "a " + x + " b" are both `a … b`. The two strings of a condition are … in the
    text, and texts of their own. What precedes the first string is left out.
    """
    text, between = "", ""
    for found in CXX.finditer(source):
        if found["text"] is not None:
            string = found["text"].replace('\\"', '"')
            text += "…" if text and between not in {"", ",", "+", "<<"} else ""
            if between.endswith(("?", ":")):
                yield string
                string = "…"
            text, between = text + string, ""
        elif found["other"] in {";", "{", "}"}:
            yield text
            text, between = "", ""
        elif found["other"]:
            between += found["other"]


def read_cmake(source: str) -> Iterator[str]:
    """Yields the text of each error that ends a configuration."""
    for strings in re.findall(r'FATAL_ERROR((?:\s+"[^"]*")+)', source):
        yield re.sub(r'"\s+"', "", strings).strip()[1:-1]


def read_sources(read, names: str, *folders: str) -> Iterator[str]:
    for path in chain.from_iterable(sorted((ROOT / f).rglob("*")) for f in folders):
        if re.search(names, path.name):
            yield from map(normalise, read(path.read_text(encoding="utf-8")))


def normalise(text: str) -> str:
    """Returns a text with one … for several, and one before a leading colon."""
    return " ".join(re.sub("^(?=:)|…[….]*…", "…", text).split())


@pytest.fixture(scope="module")
def texts() -> set[str]:
    return {
        *read_sources(read_python, r"\.py$", "python/minifloat"),
        *read_sources(read_python, "^check_environment.py$", "tools"),
        *read_sources(read_cxx, r"\.(h|cpp|cu|cuh)$", "include", "src", "torch"),
        *read_sources(read_cmake, r"\.cmake$", "cmake"),
    }


# ---- The page ------------------------------------------------------------------------------------
def read_quotes(page: str) -> list[str]:
    """Returns the code spans of the lines that begin with `>`, each an error's words."""
    quoted = "\n".join(re.findall("^>(.*)$", page, re.MULTILINE))
    return [normalise(text) for _, text in re.findall(r"(`+)(.+?)\1(?!`)", quoted, re.DOTALL)]


def is_quoted(text: str, quote: str) -> bool:
    """Tells whether a quote has a text's words, or … for some.

    A text of C++ ends at its last string: a quote may have … after it.
    """
    words = ".*".join(map(re.escape, quote.split("…")))
    return any(re.fullmatch(words, form) for form in (text, text + "…"))


def find_missing(texts: set[str], page: str) -> list[str]:
    """Returns the texts that name a remedy and that no entry quotes."""
    shown = read_quotes(page)
    with_remedy = sorted(filter(REMEDY.search, texts))
    return [text for text in with_remedy if not any(is_quoted(text, quote) for quote in shown)]


def test_texts_are_found_in_both_languages():
    python = """raise ValueError(f"a: got {b}; " + ("use c" if d else "leave it"))"""
    assert {"a: got …; …", "use c", "leave it"} <= {normalise(t) for t in read_python(python)}
    cxx = """CHECK(a, op, ": got ", b ? "c" : "d", "; use "  // "e"
                   "f(\\"g\\")");"""
    assert {'…: got …; use f("g")', "c", "d"} <= {normalise(t) for t in read_cxx(cxx)}


def test_each_error_with_a_remedy_has_an_entry(texts):
    assert find_missing(texts, PAGE.read_text()) == []


def test_each_quote_is_in_the_sources(texts):
    shown = read_quotes(PAGE.read_text())
    assert [q for q in shown if not any(is_quoted(text, q) for text in texts)] == []
    assert [q for q in shown if len(re.findall(r"\w+", q)) < LEAST_WORDS] == []
    assert len(set(shown)) == len(shown)
