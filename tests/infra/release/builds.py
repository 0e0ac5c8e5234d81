"""Runs a build as Cloud Build does: its substitutions, its order, and in each step only the
programs in the step's image.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.limits import TEST_LIMIT_S

_PROGRAMS = """
    [ awk basename cat chmod cp cut date dirname echo env expr false find grep gunzip gzip head id
    ln ls mkdir mktemp mv nice printf pwd readlink realpath rm rmdir sed sh sha256sum sleep sort
    tail tar tee test touch tr true uname uniq wc xargs
"""
EVERYWHERE = tuple(_PROGRAMS.split())
"""Programs that both Debian and Alpine have."""
IN_IMAGE = {
    "gcr.io/cloud-builders/docker": ("bash", "docker", "git"),
    "gcr.io/cloud-builders/kubectl": ("bash", "gcloud", "kubectl", "python3"),
    "gcr.io/google.com/cloudsdktool/google-cloud-cli": ("bash", "curl", "gcloud", "git", "python3"),
    "docker.io/library/python": ("bash", "curl", "git", "make", "python", "python3", "pip"),
    "docker.io/anchore/syft": ("syft",),
    # Alpine: no bash.
    "docker.io/hashicorp/terraform": ("git", "terraform"),
}
"""Additional programs in each step's image. syft's image contains nothing else at all."""


class StepFailed(Exception):
    """A step exited with a status other than 0."""

    def __init__(self, step: str, output: str) -> None:
        super().__init__(f"step {step!r} failed:\n{output[-6000:]}")
        self.step = step
        self.output = output


@dataclass(frozen=True)
class Build:
    """A build in the format of Cloud Build's API, with its substitutions applied."""

    account: str
    steps: tuple[dict[str, Any], ...]


def resolve(build: Mapping[str, Any], built_in: Mapping[str, str]) -> Build:
    """Applies a build's substitutions.

    Raises:
        ValueError: the build uses a name that is not defined (substitutionOption MUST_MATCH).
    """
    given = {**built_in, **build.get("substitutions", {})}
    names = {name: _substituted(value, given) for name, value in given.items()}

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return _substituted(value, names)
        if isinstance(value, list):
            return [fill(one) for one in value]
        if isinstance(value, dict):
            return {name: fill(one) for name, one in value.items()}
        return value

    account = fill(build["serviceAccount"]).rpartition("/")[2]
    return Build(account, tuple(fill(step) for step in build["steps"]))


def _substituted(text: str, names: Mapping[str, str], depth: int = 0) -> str:
    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$$" if depth else "\0"
        name = match[1] or match[2]
        if name not in names:
            raise ValueError(f"${name} is not a substitution of this build: {text}")
        # dynamicSubstitutions: values refer to other substitutions.
        return _substituted(names[name], names, depth + 1)

    found = re.sub(r"\$\$|\$\{([A-Z_][A-Z0-9_]*)\}|\$([A-Z_][A-Z0-9_]*)", value, text)
    return found if depth else found.replace("\0", "$")


def in_order(steps: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One possible order for Cloud Build: of the steps that may run, always the last one in the
    file.

    This way, a step can't accidentally rely on another step's files.
    """
    waiting = list(steps)
    done: set[str] = set()
    ordered = []
    while waiting:
        ready = [step for step in waiting if set(step.get("waitFor", [])) - {"-"} <= done]
        waiting.remove(ready[-1])
        ordered.append(ready[-1])
        done.add(ready[-1]["id"])
    return ordered


def programs_of(image: str, programs: Path, folder: Path) -> Path:
    """Creates the folder that serves as an image's PATH; stand-ins in `programs` come first."""
    name = re.sub(r":[^:/]+$", "", image.partition("@")[0])
    has = IN_IMAGE[name]
    made = folder / re.sub(r"\W+", "-", name)
    if made.exists():
        return made
    made.mkdir(parents=True)
    wanted = has if has == ("syft",) else (*EVERYWHERE, *has)
    for program in wanted:
        own = programs / program
        place = str(own) if own.exists() else shutil.which(program)
        if program in ("python", "python3"):
            place = getattr(sys, "_base_executable", sys.executable)
        if place:
            (made / program).symlink_to(place)
    return made


def run_step(
    step: Mapping[str, Any], workspace: Path, path: Path, environment: Mapping[str, str]
) -> str:
    """Runs a step. Returns its output.

    Raises:
        StepFailed: the step failed, or its program is not in its image.
    """
    entry = step.get("entrypoint") or step["name"].rpartition("/")[2].partition(":")[0]
    program = entry.replace("/workspace", str(workspace)) if "/" in entry else str(path / entry)
    if not os.access(program, os.X_OK):
        raise StepFailed(step["id"], f"exec: {entry!r}: executable file not found in $PATH")
    given = dict(pair.split("=", 1) for pair in step.get("env", []))
    done = subprocess.run(
        [program, *step.get("args", [])],
        cwd=workspace,
        env={**environment, "PATH": str(path), **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TEST_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise StepFailed(step["id"], done.stdout)
    return done.stdout
