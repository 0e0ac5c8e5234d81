"""Plain diffusers pipelines as references for images. Each folder is loaded once."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

KEPT_PIPELINES = 8
"""A few consecutive tests compare with the same folder, and later tests don't use it."""


def plain_pipeline(kind: Any, folder: Path) -> Any:
    """The pipeline for a folder, with a scheduler that hasn't been used yet.

    Tests share it. A test that changes the pipeline's networks must load a separate one.
    """
    pipeline = _read(kind, folder)
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    return pipeline


@lru_cache(maxsize=KEPT_PIPELINES)
def _read(kind: Any, folder: Path) -> Any:
    index = json.loads((folder / "model_index.json").read_text())
    # diffusers requires the names of any parts missing from a folder.
    left_out = {name: None for name, place in index.items() if place == [None, None]}
    pipeline = kind.from_pretrained(folder, local_files_only=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
