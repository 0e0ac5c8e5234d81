"""Models of one's own: a class in the interface of Cog, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from shared.catalog import Model
from workers.models.base import LoadedModel, Preparer
from workers.tasks.base import Resources, WorkerTask


class CustomWorker(WorkerTask):
    """Preparing an input copies its files at most."""

    optimizer = "custom"
    variants = ()
    variant_prefix = "custom"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """None: a class is computed as it is."""
        return ()

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """All of them: between two steps, predictions are canceled and their pieces reported."""
        return True

    def loads_before_fork(self, entry: Model) -> bool:
        """No: each model process starts a runner of its own."""
        return False

    def provide(self, entry: Model, folder: Path) -> None:
        """The environment with its packages, if it brings some."""
        from workers.models.custom.environments import python_for

        python_for(folder)

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Passes inputs on."""
        from workers.models.custom.preparation import CustomPreparer

        return CustomPreparer()

    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """The class, in a runner."""
        from workers.models.custom.model import CustomModel

        return CustomModel(entry, folder, resources.device, resources.threads)


TASK = CustomWorker()
