"""Earlier releases' trees, taken from the repository's history, and how to run their code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import WAIT_LIMIT_S

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
"""One folder per release, written by `python -m tests.releases.write` when the release is cut."""
PARTS = ("api", "infra", "models", "models.yaml", "shared", "workers")
"""The parts of the repository that a release runs."""


def releases() -> list[str]:
    """The releases that left files, oldest first. `unreleased` is the tree that was written
    last.
    """
    names = [path.parent.name for path in FILES.glob("*/release.json")]
    return sorted(names, key=_number)


def last_release() -> str:
    """The latest release that was cut."""
    return [name for name in releases() if name[0].isdecimal()][-1]


def commit_of(release: str) -> str:
    commit: str = json.loads((FILES / release / "release.json").read_text())["commit"]
    return commit


def tree_at(commit: str, folder: Path) -> Path:
    """The code at a commit, extracted into a new folder. Skips the test if the history lacks the
    commit.
    """
    tree = folder / f"tree-{commit[:12]}"
    if not has_commit(commit):
        pytest.skip("the repository's history does not go back to the last release")
    archive = ["git", "archive", "--format=tar", commit, *PARTS]
    packed = subprocess.run(
        archive, cwd=ROOT, capture_output=True, timeout=WAIT_LIMIT_S, check=True
    ).stdout
    tree.mkdir(parents=True, exist_ok=True)
    # tarfile has no filters before Python 3.11.4 and requires one starting with 3.12.
    subprocess.run(["tar", "-x", "-C", tree], input=packed, timeout=WAIT_LIMIT_S, check=True)
    where = subprocess.run(
        [sys.executable, "-c", "import api, shared, workers; print(api.__file__)"],
        env=os.environ | environment_of(tree),
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=True,
    ).stdout
    assert Path(where.strip()).is_relative_to(tree), "another tree's code would run"
    return tree


def has_commit(commit: str) -> bool:
    """True if the history has the commit. Shallow clones, packages and builds have no history."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return False
    asked = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, timeout=WAIT_LIMIT_S, check=False)
    return done.returncode == 0


def environment_of(tree: Path) -> dict[str, str]:
    """Variables that make `python -m` run a tree's code, no matter which folder it starts in."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def _number(release: str) -> tuple[float, ...]:
    if not release[0].isdecimal():
        return (float("inf"),)
    return tuple(float(part) for part in release.split("."))
