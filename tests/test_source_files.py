"""The list of the repository's files matches git's own, and no other code asks git for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.limits import WAIT_LIMIT_S
from tests.source_files import source_files

ROOT = Path(__file__).parents[1]
TREE = {
    ".gitignore": "*.log\n/build\nkept/\n!important.log\n# none\n**/cache\n",
    "a.log": "",
    "important.log": "",
    "build/made": "",
    "src/build/written": "",
    "src/.gitignore": "!a.log\nlocal.*\n",
    "src/a.log": "",
    "src/b.log": "",
    "src/local.py": "",
    "src/deep/cache/entry": "",
    "src/deep/file.py": "",
    "kept/file": "",
    "a/kept/file": "",
    "name with spaces": "",
    "schräg.md": "",
}


def of_git(folder: Path) -> list[Path]:
    """The files that git tracks, and the untracked files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, timeout=WAIT_LIMIT_S, check=True
    ).stdout
    paths = {Path(os.fsdecode(name)) for name in found.split(b"\0") if name}
    return sorted((path for path in paths if os.path.lexists(folder / path)), key=os.fsencode)


def test_rules_are_those_of_git(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("src")
    found = source_files(tmp_path)
    assert Path("src/a.log") in found
    assert Path("a/kept/file") not in found
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, timeout=WAIT_LIMIT_S, check=True)
    assert found == of_git(tmp_path)


def test_list_is_that_of_git() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("git or this tree's .git is not there")
    assert source_files(ROOT) == of_git(ROOT)


def test_nothing_else_asks_git_for_the_list() -> None:
    """`gcloud builds submit` leaves out `.git`, so the tests in a build would fail."""
    asking = {
        path
        for path in source_files(ROOT)
        if path.suffix in {".py", ".sh"} or path.name == "Makefile"
        if "ls-files" in (ROOT / path).read_text(encoding="utf-8")
    }
    replay = Path("tests/infra/release/test_release_replay.py")  # restores it, and sees it fail
    assert asking == {Path("tests/source_files.py"), Path("tests/test_source_files.py"), replay}


def test_build_gets_the_rules_too() -> None:
    """By default, gcloud leaves `.gitignore` out of the upload."""
    lines = (ROOT / ".gcloudignore").read_text(encoding="utf-8").splitlines()
    assert {".git", "#!include:.gitignore"} <= set(lines)
    nested = (ROOT / "infra/terraform/.gitignore").read_text(encoding="utf-8").splitlines()
    assert set(nested) <= set(lines)
    assert ".gitignore" not in lines
