"""Commits can be read: a short subject, a body that gives the reason, and no more than a person can
review. Limits of size are raised only by an ADR.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest

from tests import sizes

FIRST_FILE = "tests/component/test_commits.py"
"""The rules hold from the commit after the one that added this file."""
MAX_SUBJECT_CHARACTERS = 72
MAX_LINES_WITHOUT_BODY = 300
MAX_LINES = 1500
MAX_COMMITS = 100
"""How many of the newest commits are checked."""
GENERATED = re.compile(
    r"^(requirements/.*\.txt|docs/reference/|tests/data/|schemas/released/|.*\.(json|svg|csv))"
)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=sizes.ROOT, capture_output=True, text=True, check=True
    ).stdout


def count_new_lines(patch: str) -> int:
    """Count the lines that a patch adds and does not remove elsewhere, so that lines that only
    move or go don't count; generated files don't either.
    """
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    is_counted = False
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            is_counted = not GENERATED.match(line.rpartition(" b/")[2])
        elif is_counted and line.startswith(("+", "-")) and not line.startswith(("+++", "---")):
            (added if line[0] == "+" else removed)[line[1:].strip()] += 1
    return (added - removed).total()


def find_faults(message: str, num_new_lines: int) -> list[str]:
    """Return what a commit's rules say against a message and a number of new lines."""
    subject, _, body = message.strip().partition("\n")
    faults = []
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        faults.append(f"its subject has {len(subject)} characters; {MAX_SUBJECT_CHARACTERS} fit")
    if num_new_lines > MAX_LINES_WITHOUT_BODY and not body.strip():
        faults.append(f"{num_new_lines} new lines without a body: say why, and how it was tested")
    if num_new_lines > MAX_LINES:
        faults.append(f"{num_new_lines} new lines; at most {MAX_LINES} can be reviewed")
    return faults


def list_commits() -> list[str]:
    first = git("log", "--format=%H", "--diff-filter=A", "--", FIRST_FILE).split()
    if not first:
        return []
    newest = ("--no-merges", f"--max-count={MAX_COMMITS}", "--format=%H")
    return git("log", *newest, f"{first[-1]}..HEAD").split()


def test_moved_lines_and_generated_files_are_not_counted() -> None:
    patch = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
-x = 1
-y = 2
+z = 3
diff --git a/b.py b/c/b.py
--- a/b.py
+++ b/c/b.py
+    x = 1
+w = 4
diff --git a/docs/reference/config.md b/docs/reference/config.md
+++ b/docs/reference/config.md
+generated
"""
    assert count_new_lines(patch) == 2


@pytest.mark.parametrize(
    ("message", "num_new_lines", "num_faults"),
    [
        ("Read rows", 300, 0),
        ("Read rows", 301, 1),
        ("Read rows\n\nBecause.", 1500, 0),
        ("Read rows\n\nBecause.", 1501, 1),
        ("x" * 73, 5000, 3),
    ],
)
def test_rules_of_a_commit(message: str, num_new_lines: int, num_faults: int) -> None:
    assert len(find_faults(message, num_new_lines)) == num_faults


def test_commits_keep_the_rules() -> None:
    for commit in list_commits():
        patch = git("show", "--format=", "--no-ext-diff", "-U0", "--no-renames", commit)
        faults = find_faults(git("log", "-1", "--format=%B", commit), count_new_lines(patch))
        assert not faults, f"commit {commit}: {'; '.join(faults)}"


def test_raised_limit_comes_with_an_adr() -> None:
    file = str(sizes.LIMITS.relative_to(sizes.ROOT))
    for commit in git("log", "--no-merges", "--format=%H", "--diff-filter=M", "--", file).split():
        raised = sizes.find_raised(
            sizes.read_limits(git("show", f"{commit}^:{file}")),
            sizes.read_limits(git("show", f"{commit}:{file}")),
        )
        adrs = git("show", "--format=", "--name-only", commit, "--", "docs/adr")
        assert adrs or not raised, f"commit {commit} raises {', '.join(raised)} without an ADR"
