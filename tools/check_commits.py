"""Check the messages of the commits since FIRST, which is checked too. Merges are left out.

usage: check_commits.py [--self-test | --message FILE]

A message has a subject in the imperative, one blank line and a body:

    Move src/cuda into rooms

    One floor of 34 files becomes seven folders, so that a reader finds a kernel by what it does.
    Built for sm_90a, sm_100a and sm_103a; ctest and pytest pass.

An exported tree, and a clone without FIRST, have no commits to check: the output says so, and the
exit status is 0. --message checks one message from a file, as git's hook commit-msg calls it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "8d8197374a1dd2bbc4124e1660067036029c903c"  # Move src/cuda into rooms
SUBJECT_COLUMNS = 72
BODY_COLUMNS = 100

TRAILER = re.compile(r"[A-Z][A-Za-z-]+-[a-z]+: ")  # Signed-off-by: and its like are no sentence
SENTENCE = re.compile(r"\w.*\s.*\w.*[.!?:)](\s|$)", re.DOTALL)
MERGE = re.compile(r"Merge (branch|branches|commit|remote-tracking branch|tag|pull request) ")

# First words that are no verb in the imperative. Verbs that look like another form are in VERBS.
OTHER_FORM = re.compile(r"\w+(ed|ing|[^s]s)")
VERBS = {"Alias", "Bias", "Bring", "Embed", "Exceed", "Feed", "Focus", "Need", "Precede", "Proceed"}
VERBS |= {"Seed", "Shed", "Speed", "Spread", "String"}
NO_VERBS = {"A", "All", "Also", "An", "And", "As", "At", "By", "Every", "For", "From", "How", "If"}
NO_VERBS |= {"In", "It", "Its", "More", "New", "No", "Not", "Now", "Of", "On", "Or", "Our", "Some"}
NO_VERBS |= {"That", "The", "Their", "There", "These", "They", "This", "Those", "To", "We", "What"}
NO_VERBS |= {"When", "Where", "Which", "Who", "Why", "With", "Without", "Wip"}


# ---- The rules -----------------------------------------------------------------------------------
def check_subject(subject: str) -> Iterator[str]:
    if len(subject) > SUBJECT_COLUMNS:
        yield f"subject: expected at most {SUBJECT_COLUMNS} characters, it has {len(subject)}"
    if subject.endswith("."):
        yield "subject: expected no period at the end"
    word = subject.split(" ")[0]
    if not re.fullmatch(r"[A-Z][a-z]+", word):
        yield f"subject: expected a verb with a capital first, not {word!r}"
    elif word in NO_VERBS or (OTHER_FORM.fullmatch(word) and word not in VERBS):
        yield f"subject: expected a verb in the imperative first, as in 'Add', not {word!r}"


def check_body(lines: list[str]) -> Iterator[str]:
    """Check the lines after the subject."""
    if lines[:1] != [""] or lines[1:2] == [""]:
        yield "expected one blank line after the subject, then a body"
        return
    prose = "\n".join(line for line in lines if not TRAILER.match(line)).strip()
    if not SENTENCE.search(prose):
        yield "body: expected a sentence that says why, and how it was tested"
    for number, line in enumerate(lines, start=2):
        if len(line) > BODY_COLUMNS and "://" not in line:
            yield f"line {number}: expected at most {BODY_COLUMNS} columns, it has {len(line)}"


def check_message(message: str) -> list[str]:
    subject, *rest = [line.rstrip() for line in message.rstrip().split("\n")]
    return [*check_subject(subject), *check_body(rest)]


# ---- Reading -------------------------------------------------------------------------------------
def git(*arguments: str) -> str:
    """Run git in ROOT. Raises OSError without git, CalledProcessError when git refuses."""
    command = ["git", "-C", str(ROOT), *arguments]
    run = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    return run.stdout


def find_why_none() -> str | None:
    """Return why there are no commits to check, or None where FIRST is in the history of HEAD."""
    try:
        top = git("rev-parse", "--show-toplevel").strip()
    except OSError:
        return "git is not on the path"
    except subprocess.CalledProcessError as error:
        return f"this tree is no clone ({error.stderr.strip().splitlines()[0]})"
    if Path(top).resolve() != ROOT:
        return "this tree is no clone"
    try:
        git("merge-base", "--is-ancestor", FIRST, "HEAD")
    except subprocess.CalledProcessError:
        return f"the first commit to check, {FIRST[:7]}, is not in this history"
    return None


def read_commits() -> Iterator[tuple[str, str]]:
    """Yield the short hash and the message of each commit since FIRST, oldest first."""
    form = "--format=%h%n%B%x00"
    first = git("log", "-1", form, FIRST)
    later = git("log", "--reverse", "--no-merges", form, f"{FIRST}..HEAD")
    for entry in (first + later).split("\0"):
        if entry.strip():
            short, message = entry.lstrip("\n").split("\n", 1)
            yield short, message


def read_message(path: Path) -> str | None:
    """Read a message as git's editor leaves it; None for a merge's, which is not checked."""
    text = path.read_text(encoding="utf-8").split("\n# ---", 1)[0]
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    message = "\n".join(lines).strip()
    return None if MERGE.match(message) else message


# ---- Self-test -----------------------------------------------------------------------------------
# (message, number of problems): each rule broken once, and each look-alike let through.
WHY = "\n\nIt was wrong at zero. Tested by ctest."
CASES: tuple[tuple[str, int], ...] = (
    ("Add a rule" + WHY, 0),
    ("Add a rule" + WHY + "\n\nSigned-off-by: A B <a@b.c>\n", 0),
    ("Address what a reviewer asked" + WHY, 0),
    ("Seed the streams of two layers apart" + WHY, 0),
    ("A" + "d" * 71 + WHY, 0),
    ("Add " + "d" * 68 + WHY, 0),
    ("Add " + "d" * 69 + WHY, 1),
    ("Add a rule." + WHY, 1),
    ("add a rule" + WHY, 1),
    ("docs: add a rule" + WHY, 1),
    ("src/cuda: add a rule" + WHY, 1),
    ("Added a rule" + WHY, 1),
    ("Adds a rule" + WHY, 1),
    ("Adding a rule" + WHY, 1),
    ("The rule is added" + WHY, 1),
    ("What a rule is" + WHY, 1),
    ("", 2),
    ("Add a rule", 1),
    ("Add a rule\n", 1),
    ("Add a rule\nIt was wrong at zero.", 1),
    ("Add a rule\n\n\nIt was wrong at zero.", 1),
    ("Add a rule\n\nzero", 1),
    ("Add a rule\n\nSigned-off-by: A B <a@b.c>", 1),
    ("Add a rule" + WHY + "\n" + "word " * 19 + "words", 0),
    ("Add a rule" + WHY + "\n" + "word " * 20 + "w", 1),
    ("Add a rule" + WHY + "\nhttps://example.org/" + "a" * 100, 0),
)


def self_test() -> int:
    failures = 0
    for message, expected in CASES:
        found = check_message(message)
        if len(found) != expected:
            failures += 1
            print(f"{message!r}: expected {expected} problems, found {len(found)}: {found}")
    print(f"check_commits: self-test: {len(CASES) - failures} of {len(CASES)} cases right")
    return 1 if failures else 0


# ---- The command ---------------------------------------------------------------------------------
def check_file(path: Path) -> int:
    message = read_message(path)
    problems = [] if message is None else check_message(message)
    for problem in problems:
        print(f"check_commits: {problem}")
    return 1 if problems else 0


def check_history() -> int:
    if why := find_why_none():
        print(f"check_commits: nothing checked: {why}")
        return 0
    commits = list(read_commits())
    found = [(short, problem) for short, text in commits for problem in check_message(text)]
    for short, problem in found:
        print(f"{short}: {problem}")
    print(f"check_commits: {len(commits)} commits since {FIRST[:7]}, {len(found)} problems")
    return 1 if found else 0


def main() -> int:
    match sys.argv[1:]:
        case []:
            return check_history()
        case ["--self-test"]:
            return self_test()
        case ["--message", path]:
            return check_file(Path(path))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
