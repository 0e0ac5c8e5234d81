"""Embedding models: sentence encoders in torch or ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from workers.models.backend import Backend, choose_unmeasured_backend
from workers.models.base import InferenceModel, Preparer
from workers.models.embedding.model_folder import SentenceFolder, read_sentence_folder
from workers.tasks.base import Resources, WorkerTask

if TYPE_CHECKING:
    from workers.models.embedding.model import EmbeddingModel, Encoder


class EmbeddingWorker(WorkerTask):
    """Preparing a text takes microseconds. Libraries are imported where they are used."""

    optimizer = "embedding"
    variants = ("fp32", "int8", "int8-static", "fp16", "pruned")
    variant_prefix = "onnx"

    def measures_backends(self, entry: Model) -> bool:
        return True

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """Includes FP16 only for GPUs."""
        return (
            ("fp32", "int8", "int8-static")
            + (("fp16",) if has_gpu else ())
            + (("pruned",) if cuts else ())
        )

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        from workers.models.embedding.tokenization import TextPreparer

        preparer = TextPreparer(folder)
        check_window(entry, preparer.max_length)
        return preparer

    def model(self, entry: Model, folder: Path, resources: Resources) -> InferenceModel:
        return encoder_model(entry, folder, resources)


def check_window(entry: Model, max_length: int) -> None:
    """Checks that a model reads no more of a text than the budgets reserve for it.

    Args:
        entry: the model's entry in the catalog.
        max_length: maximum number of tokens that the model reads from a text.

    Raises:
        ConfigurationError: the model reads more tokens than that.
    """
    declared = entry.text.max_input_tokens
    if declared is not None and max_length > declared:
        raise ConfigurationError(
            f"must be at least {max_length} tokens, the maximum that the model reads, got "
            f"{declared}",
            field="text.max_input_tokens",
        )


def encoder_model(entry: Model, folder: Path, resources: Resources) -> EmbeddingModel:
    """Returns the model that computes text vectors, which is not loaded yet.

    Raises:
        ConfigurationError: the folder does not contain a sentence encoder, or the entry requires a
            backend that was not passed.
    """
    from workers.models.embedding.model import EmbeddingModel

    # Read first, so that an invalid folder is rejected before seconds are spent on importing torch.
    settings = read_sentence_folder(folder)
    backend = resources.backend or choose_unmeasured_backend(entry)
    encoder = _encoder(settings, backend, resources)
    return EmbeddingModel(entry, encoder, call_tokens=backend.call_tokens)


def _encoder(settings: SentenceFolder, backend: Backend, resources: Resources) -> Encoder:
    if backend.backend == "onnx":
        from workers.models.embedding.encoder_onnx import OnnxEncoder

        return OnnxEncoder(
            settings,
            Path(backend.graph),
            device=resources.device,
            threads=resources.threads,
            memory_fraction=resources.memory_fraction,
        )
    from workers.models.device import Device
    from workers.models.embedding.encoder_torch import TorchEncoder

    device = Device(resources.device, resources.threads, resources.memory_fraction)
    return TorchEncoder(settings, device, backend.precision)


TASK = EmbeddingWorker()
