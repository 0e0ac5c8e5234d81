"""The shipped models as a pool hosts them, and an image for the image model. Imports no torch."""

from pathlib import Path

from shared.models.catalog_file import read_catalog
from workers.models.base import PreparedImage
from workers.models.source import resolve
from workers.runtime.pool import HostedModel

IMAGE = PreparedImage(
    key="",
    length=4 * 64 * 64,
    prompt="a large red circle",
    negative_prompt="",
    width=64,
    height=64,
    steps=4,
    guidance_scale=2.0,
    seed=1,
    scheduler="default",
)


def hosted(task: str) -> HostedModel:
    entry = read_catalog(Path("models.yaml")).default(task)
    return HostedModel(entry, resolve(entry.source, entry.revision, Path("unused")))
