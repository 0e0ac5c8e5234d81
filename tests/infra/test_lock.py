"""constraints.txt: complete, with hashes, and consistent with pyproject.toml and the installed
packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from infra.local.doctor import EXTRAS
from infra.lock import normalize_name, read_lock, unmet
from tests.limits import WAIT_LIMIT_S

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
MEMBERS = {
    name: PROJECT["project"]["version"] for name in ("penstock", *PROJECT["tool"]["uv"]["sources"])
}
"""Packages that come from the repository rather than from an index."""
REPORTED: dict[str, list[str]] = {
    one["name"]: one["requires-dist"] for one in PROJECT["tool"]["uv"]["dependency-metadata"]
}
"""Requirements assumed for packages by name, no matter what they declare."""


def installed(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[str]:
    """The names of all packages installed with a requirement, including its own name."""
    for extra in ("", *requirement.extras):
        key = (normalize_name(requirement.name), extra)
        if key in seen:
            continue
        seen.add(key)
        yield key[0]
        for text in REPORTED.get(key[0], distribution(requirement.name).requires or ()):
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                yield from installed(needed, seen)


def test_lock_has_what_the_project_asks_for() -> None:
    assert unmet() == []


def test_every_package_has_hashes() -> None:
    assert [name for name, locked in read_lock().items() if not locked.hashes] == []


def test_lock_has_all_that_is_installed_for_the_project() -> None:
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in EXTRAS:
        asked += PROJECT["project"]["optional-dependencies"][extra]
    seen: set[tuple[str, str]] = set()
    found = {name for text in asked for name in installed(Requirement(text), seen)}
    versions = {name: distribution(name).version.partition("+")[0] for name in found}
    locked = {name: one.version for name, one in read_lock().items()}
    locked |= MEMBERS
    assert versions.items() <= locked.items(), sorted(versions.items() - locked.items())
    assert len(found) > 100


def test_lock_names_no_index_and_no_place() -> None:
    for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(
            r"#.*|[a-z0-9.-]+==\S+( ; .*)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line
        ), line


def test_torch_asks_for_what_the_lock_was_made_from() -> None:
    plain = {text for text in distribution("torch").requires or () if ";" not in text}
    assert set(REPORTED["torch"]) == plain


def test_reported_requirements_are_of_the_pinned_versions() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    pins = {text for extra in extras for text in extra}
    for reported in PROJECT["tool"]["uv"]["dependency-metadata"]:
        assert f"{reported['name']}=={reported['version']}" in pins


@pytest.mark.parametrize("asked", ["six==0.1", "no-such-package==1.0", "six>=1"])
def test_what_the_lock_lacks_is_named(asked: str, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[build-system]\nrequires = []\n[project]\nname = "any"\nversion = "0.1"\n'
        f'dependencies = ["{asked}"]\n[project.optional-dependencies]\n'
    )
    assert unmet(project) == [asked]


@pytest.mark.parametrize(
    ("asked", "member_asks", "missing"),
    [
        ("a-server==0.1", "six==0.1", "six==0.1"),
        ("a-server==0.2", "numpy==2.4.6", "a-server==0.2"),
    ],
)
def test_members_of_the_workspace_are_looked_through(
    asked: str, member_asks: str, missing: str, tmp_path: Path
) -> None:
    project, member = tmp_path / "pyproject.toml", tmp_path / "servers/a/pyproject.toml"
    member.parent.mkdir(parents=True)
    member.write_text(
        '[build-system]\nrequires = []\n[project]\nname = "a_server"\nversion = "0.1"\n'
        f'dependencies = []\n[project.optional-dependencies]\ntest = ["{member_asks}"]\n'
    )
    project.write_text(
        '[build-system]\nrequires = []\n[project]\nname = "any"\nversion = "0.1"\n'
        f'dependencies = ["{asked}"]\n'
        '[project.optional-dependencies]\n[tool.uv.workspace]\nmembers = ["servers/*"]\n'
    )
    assert unmet(project) == [missing]


def test_commands_print_for_pip() -> None:
    def said(*words: str) -> str:
        command = [sys.executable, "infra/lock.py", *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=WAIT_LIMIT_S
        ).stdout

    locked = read_lock()
    assert said("pins").splitlines() == [f"{name}=={one.version}" for name, one in locked.items()]
    assert said("only", "uv").split() == [
        f"uv=={locked['uv'].version}",
        *(f"--hash={one}" for one in locked["uv"].hashes),
    ]
    assert said("check") == ""


def test_setup_installs_what_the_doctor_looks_for() -> None:
    (line,) = re.findall(r"^EXTRAS := (.*)$", Path("Makefile").read_text(encoding="utf-8"), re.M)
    assert tuple(line.split(",")) == EXTRAS


def test_what_is_installed_and_not_in_the_lock_is_named(tmp_path: Path) -> None:
    locked = read_lock()
    lines = [f"{name}=={locked[name].version}" for name in ("torch", "redis")]
    lines[0] += "+cu126"  # a build from a custom index
    lines += ["nvidia-cublas==13.0", "redis-py==1", "Weights_Of_Mine==1.0", "redis==0.1"]
    installed = tmp_path / "installed.txt"
    installed.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "infra/lock.py", "covers", str(installed), "nvidia-*"]
    done = subprocess.run(
        [*command, "weights-of-mine==1.0"],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "not in constraints.txt: redis-py==1, redis==0.1\n",
    )
    installed.write_text("\n".join(lines[:2]) + "\n")
    assert subprocess.run(command, timeout=WAIT_LIMIT_S, check=False).returncode == 0
