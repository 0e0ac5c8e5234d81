"""Folders with classes of one's own, and what runs them in the tests."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from shared.catalog import Model
from shared.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from workers.models.base import PreparedCustom, PreparedFile, StepEnd
from workers.models.custom.checking import inspect_folder
from workers.models.custom.model import CustomModel

HEAD = """
from __future__ import annotations
import asyncio, io, os, sys, time
from typing import *
import cog
from cog import *
"""


def write_class(folder: Path, body: str, cog_yaml: str = "") -> Path:
    """Writes predict.py, and cog.yaml if it is given."""
    (folder / "predict.py").write_text(HEAD + textwrap.dedent(body))
    if cog_yaml:
        (folder / "cog.yaml").write_text(textwrap.dedent(cog_yaml))
    return folder


def entry_of(folder: Path, **more: Any) -> Model:
    """The entry of the catalog for a folder, with its interface."""
    interface = inspect_folder(folder).interface
    given = {"name": "mine", "task": "custom", "source": f"local:{folder}", **more}
    return Model.model_validate({**given, "interface": interface})


def prepared(
    values: dict[str, Any],
    files: list[PreparedFile] | None = None,
    *,
    is_streamed: bool = False,
) -> PreparedCustom:
    """An item as the I/O process sends it."""
    return PreparedCustom(
        key="", length=1, values=values, files=files or [], is_streamed=is_streamed
    )


def compute(
    model: CustomModel, values: dict[str, Any], files: list[PreparedFile] | None = None
) -> StepEnd:
    """Runs one prediction in slot 0, to its end."""
    model.admit(0, prepared(values, files))
    for _ in range(int(WAIT_LIMIT_S / 0.05)):
        end = model.step()
        if end.results:
            return end
    raise AssertionError("no result in time")


def output_of(end: StepEnd) -> Any:
    """The output of the prediction in slot 0."""
    result = end.results[0]
    assert isinstance(result, CustomResult), result
    return result.output
