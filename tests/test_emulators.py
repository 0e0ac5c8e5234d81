"""The embedded servers are used only through their public names, and don't depend on Penstock."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("api", "bench", "infra", "models", "shared", "tests", "workers")
SERVERS = {"pubsub": "pubsub_emulator", "bigquery": "bigquery_emulator"}


def imported(folder: Path) -> set[str]:
    """The modules imported by the files in a folder."""
    return {
        module
        for file in folder.rglob("*.py")
        for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("folder", OURS)
def test_servers_are_entered_by_their_public_doors(folder: str) -> None:
    inner = tuple(f"{package}." for package in SERVERS.values())
    assert [module for module in imported(ROOT / folder) if module.startswith(inner)] == []


@pytest.mark.parametrize(("server", "package"), SERVERS.items())
def test_servers_and_their_tests_import_nothing_of_penstock(server: str, package: str) -> None:
    folder = ROOT / "emulators" / server
    tops = {module.partition(".")[0] for module in imported(folder / "src")}
    assert not tops & {*OURS, *SERVERS.values()} - {package}
    tests = {module.partition(".")[0] for module in imported(folder / "tests")}
    assert not tests & {*OURS, *SERVERS.values()} - {package, "tests"}


@pytest.mark.parametrize("server", SERVERS)
def test_versions_that_penstock_asks_for_are_those_in_the_folders(server: str) -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    project = tomllib.loads((ROOT / "emulators" / server / "pyproject.toml").read_text())["project"]
    pin = f"{project['name']}=={project['version']}"
    assert pin in asked["servers"]
    assert pin in asked["local"]
