"""Folders with custom classes, their catalog entries, and their predictions."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from shared.models.catalog import Model
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import CustomResult
from tests.workers.models.custom.started import StartedClass, StepEnd
from workers.models.base import PreparedCustom, PreparedFile
from workers.models.custom.checking import inspect_folder
from workers.models.custom.environments import python_for
from workers.models.custom.sources import read_sources

HEAD = """
from __future__ import annotations
import io, os, sys, time
from typing import *
import cog
from cog import *
"""


def write_class(folder: Path, body: str, cog_yaml: str = "") -> Path:
    """Writes predict.py, and cog.yaml if given."""
    # Most processes don't need asyncio, which accounts for a third of their startup time.
    imports = "import asyncio\n" if "asyncio." in body else ""
    (folder / "predict.py").write_text(HEAD + imports + textwrap.dedent(body))
    if cog_yaml:
        (folder / "cog.yaml").write_text(textwrap.dedent(cog_yaml))
    return folder


_INTERFACES: dict[tuple[str, str], ModelInterface] = {}


def entry_of(folder: Path, **more: Any) -> Model:
    """Returns a folder's catalog entry. Adds the class's interface unless `more` contains one.

    Inspecting a class takes a process and 0.3 s of CPU time, so identical sources are inspected
    only once. The process that serves a class inspects it again and rejects it if it does not match
    its entry.
    """
    given = {"name": "mine", "task": "custom", "source": f"local:{folder}", **more}
    if "interface" not in given:
        key = read_sources(folder).sha256, python_for(folder)
        if key not in _INTERFACES:
            _INTERFACES[key] = inspect_folder(folder).interface
        given["interface"] = _INTERFACES[key]
    return Model.model_validate(given)


def prepared(
    values: dict[str, Any],
    files: list[PreparedFile] | None = None,
    *,
    is_streamed: bool = False,
) -> PreparedCustom:
    """Returns an item as the I/O process sends it."""
    return PreparedCustom(
        key="", length=1, values=values, files=files or [], is_streamed=is_streamed
    )


def compute(
    model: StartedClass, values: dict[str, Any], files: list[PreparedFile] | None = None
) -> StepEnd:
    """Runs prediction 0 until it finishes."""
    model.admit(0, prepared(values, files))
    return model.steps_until(0)


def output_of(end: StepEnd, number: int = 0) -> Any:
    """Returns the output of the prediction with this number."""
    result = end.results[number]
    assert isinstance(result, CustomResult), result
    return result.output
