"""The families of pipelines whose images join a running batch, by their names in model_index.json.

It imports no model library, because the I/O process asks it too. A new family is a line here, and a
module with its Family.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from workers.models.image.family import Family


class FamilyEntry(NamedTuple):
    """The place of a family.

    `pipeline`: the name of its class for text, without "Pipeline". Those for images and masks are
    named after it. `rounds_up`: how many steps image-to-image runs of a share that is not whole.
    """

    pipeline: str
    module: str
    class_name: str
    rounds_up: bool = False


FAMILIES = (
    FamilyEntry("StableDiffusion", "stable_diffusion", "StableDiffusion"),
    FamilyEntry("StableDiffusionXL", "stable_diffusion", "StableDiffusionXL"),
    FamilyEntry("StableDiffusion3", "stable_diffusion_3", "StableDiffusion3", rounds_up=True),
)

STEPPED_PIPELINES = {
    f"{entry.pipeline}{suffix}": entry
    for entry in FAMILIES
    for suffix in ("Pipeline", "Img2ImgPipeline", "InpaintPipeline")
}
"""The families by the classes of model_index.json."""


def family_in(folder: Path) -> FamilyEntry | None:
    """Returns the family of the pipeline in `folder`. None if it has none."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    name = index.get("_class_name") if isinstance(index, dict) else None
    return STEPPED_PIPELINES.get(name) if isinstance(name, str) else None


def load_family(pipeline: object) -> Family | None:
    """Returns the family of a loaded pipeline. None if it has none."""
    entry = STEPPED_PIPELINES.get(type(pipeline).__name__)
    if entry is None:
        return None
    module = importlib.import_module(f"{__package__}.{entry.module}")
    family: Family = getattr(module, entry.class_name)()
    return family
