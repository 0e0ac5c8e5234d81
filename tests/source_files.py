"""The files in the repository, without using git, because a build has no `.git` and may not have
git.

`python -m tests.source_files` prints them, each followed by a NUL, for xargs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from pathspec import GitIgnoreSpec

Rules: TypeAlias = tuple[tuple[Path, GitIgnoreSpec], ...]
"""The `.gitignore` files in a file's parent folders, outermost first, each with its folder."""


def source_files(root: Path = Path()) -> list[Path]:
    """Returns what `git ls-files --cached --others --exclude-standard` lists, relative to `root`.

    The result has the files that no `.gitignore` under `root` excludes, in git's order.
    """
    return sorted((path.relative_to(root) for path in _below(root, ())), key=os.fsencode)


def _below(folder: Path, rules: Rules) -> Iterator[Path]:
    file = folder / ".gitignore"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines()
        rules = (*rules, (folder, GitIgnoreSpec.from_lines(lines)))
    for entry in os.scandir(folder):
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git" or _is_ignored(path, rules, is_folder=is_folder):
            continue
        if is_folder:
            yield from _below(path, rules)
        else:
            yield path


def _is_ignored(path: Path, rules: Rules, *, is_folder: bool) -> bool:
    for folder, spec in reversed(rules):  # the innermost rule that matches decides
        name = path.relative_to(folder).as_posix() + ("/" if is_folder else "")
        if (ignored := spec.check_file(name).include) is not None:
            return ignored
    return False


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path}\0" for path in source_files()))
