"""Each file in models/ has a row in its README's table, which must match the wheel and the
image.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from functools import partial
from pathlib import Path

import grimp
import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.infra.deploy.dockerfiles import copied_files, is_sent
from tests.source_files import source_files

FOLDER = Path("models")


def expand(pattern: str) -> list[str]:
    """Returns the patterns that a pattern with alternatives in braces expands to."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(parts) for parts in itertools.product(*parts)]


def rows() -> list[tuple[list[str], dict[str, bool]]]:
    """The table: patterns for paths under models/, with a yes or no in each of its columns."""
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    header, _, *body = cells
    return [
        (
            [one for pattern in re.findall(r"`([^`]+)`", row[0]) for one in expand(pattern)],
            {
                name: {"yes": True, "no": False}[cell]
                for name, cell in zip(header, row, strict=True)
                if name in ("demo", "wheel", "worker image")
            },
        )
        for row in body
    ]


def files() -> dict[Path, dict[str, bool]]:
    """The README row for each file in models/."""
    table = rows()
    used: dict[Path, dict[str, bool]] = {}
    for file in (
        path.relative_to(FOLDER) for path in source_files() if path.is_relative_to(FOLDER)
    ):
        matching = [uses for patterns, uses in table if any(map(partial(is_at, file), patterns))]
        assert len(matching) == 1, f"{file} is in {len(matching)} rows of models/README.md"
        used[FOLDER / file] = matching[0]
    return used


def is_at(file: Path, pattern: str) -> bool:
    return fnmatch.fnmatch(str(file), pattern) and str(file).count("/") == pattern.count("/")


@pytest.fixture(scope="module")
def in_wheel() -> set[Path]:
    builder = WheelBuilder(str(Path().absolute()))
    return {Path(file.distribution_path) for file in builder.recurse_included_files()}


def test_wheel_has_the_files_that_the_table_says(in_wheel: set[Path]) -> None:
    for file, uses in files().items():
        assert (file in in_wheel) == uses["wheel"], file


def test_worker_image_has_the_files_that_the_table_says() -> None:
    copied = copied_files("worker")
    for file, uses in files().items():
        assert (str(file) in copied and is_sent(file)) == uses["worker image"], file


def test_wheel_has_all_that_the_demo_imports(in_wheel: set[Path]) -> None:
    graph = grimp.build_graph("infra", "models", "shared")
    for module in graph.find_upstream_modules("infra.local.demo"):
        if module.startswith("models."):
            path = Path(*module.split("."))
            assert {path.with_suffix(".py"), path / "__init__.py"} & in_wheel, module
