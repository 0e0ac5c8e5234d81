"""Pipelines of plain diffusers that images are compared with, each read once from its folder."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

KEPT_PIPELINES = 8
"""A few tests compare with one folder, and then none does any more."""


def plain_pipeline(kind: Any, folder: Path) -> Any:
    """A pipeline of a folder, with a scheduler that has drawn nothing.

    Tests share it. One that changes its networks reads a pipeline of its own.
    """
    pipeline = _read(kind, folder)
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    return pipeline


@lru_cache(maxsize=KEPT_PIPELINES)
def _read(kind: Any, folder: Path) -> Any:
    index = json.loads((folder / "model_index.json").read_text())
    # diffusers wants to be told which parts a folder does without.
    left_out = {name: None for name, place in index.items() if place == [None, None]}
    pipeline = kind.from_pretrained(folder, local_files_only=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
