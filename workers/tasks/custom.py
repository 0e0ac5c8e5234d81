"""Models of one's own: a class in the interface of Cog, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import Model
from shared.tasks.custom import are_equal, interface_of
from workers.models.base import IsClose, LoadedModel, Preparer
from workers.tasks.base import Resources, WorkerTask


class CustomWorker(WorkerTask):
    """Preparing an input copies its files at most, unless the class weighs it."""

    optimizer = "custom"
    variants = ()
    variant_prefix = "custom"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """None: a class is computed as it is."""
        return ()

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """All that compute no batches: between two steps, predictions are canceled and admitted."""
        return not interface_of(entry).batches

    def loads_before_fork(self, entry: Model) -> bool:
        """No: each model process starts a runner of its own."""
        return False

    def prepares_on_thread(self, entry: Model) -> bool:
        """If the class weighs the inputs."""
        return interface_of(entry).weighs

    def provide(self, entry: Model, folder: Path) -> None:
        """The environment with its packages, if it brings some."""
        from workers.models.custom.environments import python_for

        python_for(folder)

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Says what inputs weigh, and which may share a batch."""
        from workers.models.custom.aside import AsideClass
        from workers.models.custom.preparation import CustomPreparer

        weigher = AsideClass(entry, folder) if interface_of(entry).weighs else None
        return CustomPreparer(entry, weigher)

    def comparer(self, entry: Model, folder: Path) -> IsClose | None:
        """The class itself, or equality if its outputs repeat themselves."""
        from workers.models.custom.aside import AsideClass

        if interface_of(entry).compares:
            return AsideClass(entry, folder).is_close
        return are_equal if entry.deterministic else None

    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """The class, in a runner."""
        from workers.models.custom.batches import CustomBatchModel
        from workers.models.custom.model import CustomModel

        if interface_of(entry).batches:
            return CustomBatchModel(entry, folder, resources.device, resources.threads)
        return CustomModel(entry, folder, resources.device, resources.threads)


TASK = CustomWorker()
