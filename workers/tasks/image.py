"""Image models: diffusion pipelines in torch."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import Model
from workers.models.base import InferenceModel, Preparer
from workers.tasks.base import Resources, WorkerTask


class ImageWorker(WorkerTask):
    """Preparing an image can mean decoding its source picture."""

    prepares_on_thread = True
    optimizer = "image"
    variants = ("tuned", "bf16", "int8", "compiled")
    variant_prefix = "torch"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """Compiling pays on GPUs."""
        return ("tuned", "bf16", "int8") + (("compiled",) if has_gpu else ())

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Checks sizes and steps, and decodes sources."""
        from workers.models.image.preprocessing import ImagePreparer

        return ImagePreparer(entry.image)

    def model(self, entry: Model, folder: Path, resources: Resources) -> InferenceModel:
        """A pipeline."""
        from workers.models.device import Device
        from workers.models.image.model import ImageModel

        return ImageModel(
            entry, folder, Device(resources.device, resources.threads, resources.memory_fraction)
        )


TASK = ImageWorker()
