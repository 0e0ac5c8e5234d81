"""Parses a Dockerfile, stage by stage."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.limits import WAIT_LIMIT_S

FOLDER = Path("infra/docker")
SOURCES = {
    "bigquery_emulator": "emulators/bigquery/src",
    "pubsub_emulator": "emulators/pubsub/src",
}
"""Folders of the packages that are not at the top level."""
IMAGES = ("api", "functions", "servers", "cuda", "worker")


@dataclass
class Stage:
    """A FROM and the instructions up to the next FROM: each one's keyword, and the rest of the
    line.
    """

    base: str
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """All instructions with this keyword, without the keyword."""
        return [rest for found, rest in self.lines if found == word]

    def last(self, word: str) -> str:
        """The last instruction with this keyword, which is the one that takes effect."""
        return self.all(word)[-1]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for rest in self.all("ENV") for pair in shlex.split(rest))

    @property
    def entry_point(self) -> list[str]:
        """The command that the image runs."""
        found: list[str] = json.loads(self.last("ENTRYPOINT"))
        return found

    @property
    def copied(self) -> list[tuple[list[str], str]]:
        """The files that COPY takes from the repository and their destinations."""
        found = [shlex.split(rest) for rest in self.all("COPY") if not rest.startswith("--from=")]
        return [(words[:-1], words[-1]) for words in found]


def stages(image: str) -> list[Stage]:
    """The stages of an image's Dockerfile, of which the last is the image; ARGs before the first
    stage are left out.
    """
    text = (FOLDER / f"{image}.Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", text))
    found: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        elif found:
            found[-1].lines.append((word, rest))
    return found


def image(name: str) -> Stage:
    return stages(name)[-1]


def copied_files(name: str) -> set[str]:
    """Every repository file that ends up in the project's part of an image."""
    sources = [source for stage in stages(name) for found, _ in stage.copied for source in found]
    return {str(file) for source in sources for file in files_below(Path(source)) if is_sent(file)}


def files_below(path: Path) -> list[Path]:
    """The path itself, or a folder's files."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def is_sent(file: Path) -> bool:
    """True if .dockerignore lets the builder see the file; the last matching rule decides."""
    sent = True
    for rule in Path(".dockerignore").read_text(encoding="utf-8").splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        if _fits(file, pattern):
            sent = rule.startswith("!")
    return sent


def _fits(file: Path, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return pattern.removeprefix("**/") in file.parts
    return pattern == "*" or file == Path(pattern) or Path(pattern) in file.parents


def upstream(modules: set[str], graph: Any) -> set[str]:
    """Returns `modules`, all of our modules that they import, and the packages that contain
    them.
    """
    found = modules | {one for module in modules for one in graph.find_upstream_modules(module)}
    return found | {
        module.rsplit(".", count)[0]
        for module in found
        for count in range(1, module.count(".") + 1)
    }


def file_of(module: str) -> str:
    """Returns the file of one of our modules."""
    top = module.partition(".")[0]
    path = Path(SOURCES.get(top, "."), *module.split("."))
    return str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a build script with these environment variables."""
    given = os.environ | environment
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False, env=given
    )
