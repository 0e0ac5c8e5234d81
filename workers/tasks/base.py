"""The worker's side of a task: how its items are prepared and computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.models.catalog import Model
from workers.models.backend import Backend
from workers.models.base import IsClose, LoadedModel, OpenGguf, Preparer
from workers.models.client import StartClient


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that a model runs on.

    `device` is `cpu`, `cuda`, `cuda:N` or `auto`. `threads` counts on a CPU. `memory_fraction` is
    the part of a GPU's memory that the process may take. `backend` is what computes an embedding.
    None: torch in the entry's precision.
    """

    device: str
    backend: Backend | None = None
    threads: int = 1
    memory_fraction: float = 1.0


class WorkerTask(ABC):
    """The models of one task. No method but `model` imports torch."""

    optimizer: ClassVar[str]
    """The module in workers/optimize that makes the variants. Its function is `make_variants`."""
    variants: ClassVar[tuple[str, ...]]
    """Names of the variants that `penstock optimize` can make, in the order it tries them."""
    variant_prefix: ClassVar[str]
    """The prefix of a variant's name in its manifest."""

    @abstractmethod
    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """The variants to make if the command line names none.

        Args:
            has_gpu: True if there is a GPU here.
            cuts: True if neurons or heads will be pruned.
        """

    def measures_backends(self, entry: Model) -> bool:
        """Returns whether a worker measures which backend is the fastest (workers/autotune).

        By default: no.
        """
        return False

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        """Returns whether this model batches continuously: items come and leave between steps.

        Its class is a SteppedModel then. By default: no.
        """
        return False

    def loads_before_fork(self, entry: Model) -> bool:
        """Returns whether model processes on a CPU may be forks of one that has loaded this model.

        By default: yes. A model that starts threads can't be forked.
        """
        return True

    def has_own_process(self, entry: Model) -> bool:
        """Returns True if this model runs in a process that is not ours (`start_own_process`).

        By default: no.
        """
        return False

    def start_own_process(
        self, entry: Model, folder: Path, resources: Resources, timeout_s: float
    ) -> StartClient:
        """Returns what starts the process of a model, if `has_own_process`.

        Args:
            resources: that the process runs on.
            timeout_s: until it is ready for the first time.
        """
        raise NotImplementedError("a model process computes the models of this task")

    def prepares_on_thread(self, entry: Model) -> bool:
        """Returns whether preparing an item takes milliseconds, which the event loop can't spare.

        By default: no.
        """
        return False

    def comparer(self, entry: Model, folder: Path) -> IsClose | None:
        """Returns a function that compares two results, if only the model has the code for it.

        None, the default: the API does (api/dispatch/closeness.py), or nobody.
        """
        return None

    def provide(self, entry: Model, folder: Path) -> None:  # noqa: B027
        """Creates everything that a model needs on this machine in addition to its folder.

        It may take minutes.

        By default: nothing.

        Raises:
            ConfigurationError: it can't be created.
        """

    def more_weights(self, entry: Model) -> Sequence[Path]:
        """Returns folders of weights that a model loads in addition to its own, on this machine.

        By default: none.
        """
        return ()

    def open_gguf(self, entry: Model) -> OpenGguf | None:
        """Returns a function that creates a model folder from a GGUF file.

        None, the default: a function for torch.
        """
        return None

    @abstractmethod
    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Returns the preparer for a model's inputs, whose files are in `folder`.

        Raises:
            ConfigurationError: the folder is not a model of this task.
        """

    @abstractmethod
    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """The model, not yet loaded.

        Raises:
            ConfigurationError: the folder is not a model of this task, or the entry needs a backend
                that is not given.
        """
