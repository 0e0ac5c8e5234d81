"""Text models: causal language models in torch or in a separate engine, computed step by step."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from shared.models.catalog import Model
from workers.models.base import LoadedModel, OpenGguf, Preparer
from workers.models.client import StartClient
from workers.tasks.base import Resources, WorkerTask

if TYPE_CHECKING:
    from workers.models.generation.vocabulary import Vocabulary


class GenerationWorker(WorkerTask):
    """Rendering a chat template and tokenizing the result can take several milliseconds."""

    slow_module = "workers.models.generation.model"
    optimizer = "text"
    variants = ()
    variant_prefix = "text"

    def usual_variants(self, *, has_gpu: bool, cuts: bool) -> tuple[str, ...]:
        """Returns nothing, because there are no variants yet."""
        return ()

    def computes_steps(self, entry: Model, folder: Path) -> bool:
        return True

    def prepares_on_thread(self, entry: Model) -> bool:
        return True

    def provide(self, entry: Model, folder: Path) -> None:
        """Downloads the adapters, and checks them before the engine starts."""
        from workers.models.engines.adapters import find_adapters

        find_adapters(entry)

    def has_own_process(self, entry: Model) -> bool:
        return entry.engine != "auto"

    def start_own_process(
        self, entry: Model, folder: Path, resources: Resources, timeout_s: float
    ) -> StartClient:
        from workers.models.engines.adapters import find_adapters
        from workers.models.engines.client import EngineClient
        from workers.models.engines.dialect import Hardware

        hardware = Hardware(resources.device, resources.threads, resources.memory_fraction)
        vocabulary, adapters = _load_vocabulary(folder), find_adapters(entry)
        return partial(EngineClient.start, entry, vocabulary, adapters, hardware, timeout_s)

    def open_gguf(self, entry: Model) -> OpenGguf | None:
        """Returns a function only for llama.cpp, which reads the file itself."""
        from workers.models.generation.gguf import open_for_engine

        return open_for_engine if entry.engine == "llama.cpp" else None

    def preparer(self, entry: Model, folder: Path) -> Preparer:
        """Returns a preparer with a chat template and a tokenizer."""
        from workers.models.generation.prompts import PromptPreparer

        return PromptPreparer(entry, folder)

    def model(self, entry: Model, folder: Path, resources: Resources) -> LoadedModel:
        """Returns a language model with its key-value cache."""
        from workers.models.device import Device
        from workers.models.generation.model import GenerationModel

        device = Device(resources.device, resources.threads, resources.memory_fraction)
        return GenerationModel(entry, folder, device)


@lru_cache(maxsize=1)
def _load_vocabulary(folder: Path) -> Vocabulary:
    """Loads a vocabulary once for all of a model's engines, one per GPU, and for their restarts.

    Loading can take seconds, in which the libraries hold the interpreter lock, so the event loop
    would stop even if another thread loaded it.
    """
    from workers.models.generation.vocabulary import Vocabulary

    vocabulary = Vocabulary(folder)
    vocabulary.load()
    return vocabulary


TASK = GenerationWorker()
