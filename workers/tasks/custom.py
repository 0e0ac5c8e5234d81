"""Custom models: classes with Cog's interface, each in a separate process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.models.tasks.custom import are_equal, interface_of
from workers.models.base import IsClose, LoadedModel, Preparer
from workers.models.client import StartClient
from workers.tasks.base import Resources, WorkerTask


class CustomWorker(WorkerTask):
    """Preparing an input only copies its files, unless the class determines the input's work."""

    optimizer = "custom"
    variants = ()
    variant_prefix = "custom"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """Returns nothing, because a class is used as it is."""
        return ()

    def has_own_process(self, entry: Model) -> bool:
        return True

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """True for classes without batches: predictions are canceled and admitted between steps."""
        return not interface_of(entry).batches

    def prepares_on_thread(self, entry: Model) -> bool:
        """True if the class determines the work of its inputs."""
        return interface_of(entry).weighs

    def provide(self, entry: Model, folder: Path) -> None:
        """Creates an environment for the class's packages, if it has any."""
        from workers.models.custom.environments import python_for

        python_for(folder)

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Computes the work of inputs, and decides which inputs may share a batch."""
        from workers.models.custom.aside import AsideClass
        from workers.models.custom.preparation import CustomPreparer

        weigher = AsideClass(entry, folder) if interface_of(entry).weighs else None
        return CustomPreparer(entry, weigher)

    def comparer(self, entry: Model, folder: Path) -> IsClose | None:
        """Compares using the class itself or, if its outputs are reproducible, by equality."""
        from workers.models.custom.aside import AsideClass

        if interface_of(entry).compares:
            return AsideClass(entry, folder).is_close
        return are_equal if entry.deterministic else None

    def start_own_process(
        self, entry: Model, folder: Path, resources: Resources, timeout_s: float
    ) -> StartClient:
        from workers.models.custom.client import ClassClient

        return partial(
            ClassClient.start, entry, folder, resources.device, resources.threads, timeout_s
        )

    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """Raises an error, because a class runs in a separate process."""
        raise ConfigurationError(f"{entry.name}: a custom class does not run in a model process")


TASK = CustomWorker()
