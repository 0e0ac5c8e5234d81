"""Image models: diffusion pipelines in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.models.catalog import Model
from workers.models.base import InferenceModel, Preparer
from workers.tasks.base import Resources, WorkerTask


class ImageWorker(WorkerTask):
    """Preparing an image may include decoding its source image."""

    slow_module = "workers.models.image.model"
    optimizer = "image"
    variants = ("tuned", "bf16", "int8", "compiled")
    variant_prefix = "torch"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        return ("tuned", "bf16", "int8") + (("compiled",) if has_gpu else ())

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """True for diffusers pipelines, unless the entry specifies otherwise."""
        from workers.models.image.folder_index import read_index

        return entry.image.join == "auto" and read_index(folder) is not None

    def provide(self, entry: Model, folder: Path) -> None:
        """Downloads the weights for the model's controls and IP-Adapters."""
        self.more_weights(entry)

    def more_weights(self, entry: Model) -> Sequence[Path]:
        """Returns the controls' folders, along with the IP-Adapters' files and image encoders."""
        from workers.models.image.folders_beside import control_folders, ip_adapter_files

        files = ip_adapter_files(entry).values()
        beside = [
            path
            for adapter_files in files
            for path in (adapter_files.weights, adapter_files.encoder)
        ]
        return tuple(dict.fromkeys([*control_folders(entry).values(), *beside]))

    def prepares_on_thread(self, entry: Model) -> bool:
        return True

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Checks sizes and steps, and decodes source images."""
        from workers.models.image.folder_index import read_index
        from workers.models.image.folders_beside import ip_adapter_files
        from workers.models.image.preprocessing import ImagePreparer

        index = read_index(folder)
        return ImagePreparer(
            entry.image,
            is_stepped=self.computes_steps(entry, folder),
            rounds_up=index is not None and index.rounds_up,
            sides_px={
                name: adapter_files.side_px
                for name, adapter_files in ip_adapter_files(entry).items()
            },
        )

    def model(self, entry: Model, folder: Path, resources: Resources) -> InferenceModel:
        from workers.models.device import Device
        from workers.models.image.model import ImageModel

        device = Device(resources.device, resources.threads, resources.memory_fraction)
        return ImageModel(entry, folder, device)


TASK = ImageWorker()
