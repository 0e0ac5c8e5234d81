"""The models a worker can run, by task; each half is imported only where it is used (no torch in the I/O process)."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import Model
from workers.models.backend import Backend, unmeasured_backend
from workers.models.base import InferenceModel, Preparer
from workers.models.embedding.model import EmbeddingModel, Encoder
from workers.models.embedding.model_folder import SentenceFolder, read_sentence_folder


def preparer_for(entry: Model, folder: Path) -> Preparer:
    """What checks and prepares the inputs of `entry`, whose files lie in `folder`.

    Raises:
        ConfigurationError: the folder is not a model of this task.
    """
    if entry.task == "embedding":
        from workers.models.embedding.tokenization import TextPreparer

        return TextPreparer(folder)
    from workers.models.image.preprocessing import ImagePreparer

    return ImagePreparer(entry.image)


def model_for(
    entry: Model,
    folder: Path,
    device: str,
    *,
    backend: Backend | None = None,
    threads: int = 1,
    memory_fraction: float = 1.0,
) -> InferenceModel:
    """The model of `entry` on `device` (`cpu`, `cuda`, `cuda:N` or `auto`), not yet loaded.

    `backend` says what computes an embedding; None: torch in the entry's precision. `threads` counts on a CPU;
    `memory_fraction` is the part of a GPU's memory that this process may take.

    Raises:
        ConfigurationError: the folder is not a model of this task, or the entry needs a backend that is not given.
    """
    if entry.task == "image":
        from workers.models.device import Device
        from workers.models.image.model import ImageModel

        return ImageModel(entry, folder, Device(device, threads, memory_fraction))
    # Read first: a wrong folder is refused before the seconds that importing torch takes.
    settings = read_sentence_folder(folder)
    backend = backend or unmeasured_backend(entry)
    return EmbeddingModel(
        entry, _encoder(settings, backend, device, threads, memory_fraction), call_tokens=backend.call_tokens
    )


def _encoder(settings: SentenceFolder, backend: Backend, device: str, threads: int, memory_fraction: float) -> Encoder:
    if backend.backend == "onnx":
        from workers.models.embedding.encoder_onnx import OnnxEncoder

        graph = Path(backend.graph)
        return OnnxEncoder(settings, graph, device=device, threads=threads, memory_fraction=memory_fraction)
    from workers.models.device import Device
    from workers.models.embedding.encoder_torch import TorchEncoder

    return TorchEncoder(settings, Device(device, threads, memory_fraction), backend.precision)
