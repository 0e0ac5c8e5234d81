"""The models a worker can run, by task; each half is imported only where it is used (no torch in the I/O process)."""

from __future__ import annotations

from pathlib import Path

from shared.catalogue import Model as Entry
from workers.models.base import Model, Preparer
from workers.models.sentence_folder import read_sentence_folder


def preparer_for(entry: Entry, folder: Path) -> Preparer:
    """What checks and prepares the inputs of `entry`, whose files lie in `folder`.

    Raises:
        ConfigurationError: the folder is not a model of this task.
    """
    if entry.task == "embedding":
        from workers.models.text_preparer import TextPreparer

        return TextPreparer(folder)
    from workers.models.image_preparer import ImagePreparer

    return ImagePreparer(entry.image)


def model_for(entry: Entry, folder: Path, device: str, *, threads: int = 1, memory_fraction: float = 1.0) -> Model:
    """The model of `entry` on `device` (`cpu`, `cuda`, `cuda:N` or `auto`), not yet loaded.

    `threads` counts on a CPU; `memory_fraction` is the part of a GPU's memory that this process may take.

    Raises:
        ConfigurationError: the folder is not a model of this task.
    """
    if entry.task == "embedding":
        # Read first: a wrong folder is refused before the seconds that importing torch takes.
        settings = read_sentence_folder(folder)
        from workers.models.device import Device
        from workers.models.embedding import EmbeddingModel

        return EmbeddingModel(entry, settings, Device(device, threads, memory_fraction))
    from workers.models.device import Device
    from workers.models.image import ImageModel

    return ImageModel(entry, folder, Device(device, threads, memory_fraction))
