"""The models of one model process: an LRU cache of models under a memory budget.

On a CPU an evicted model is loaded from disk again. On a GPU it moves to pinned host memory if
possible.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.errors import ConfigurationError
from workers.models.base import LoadedModel
from workers.runtime import memory
from workers.runtime.offload import Offloaded, offload
from workers.runtime.protocol import ResidencyReport

log = logging.getLogger(__name__)


class ResidentModels:
    """Loads models when they are used.

    Args:
        makers: create each model, not yet loaded. A model's number is its position here.
        weights: the file or folder with the weights of each, to estimate its size before the first
            load.
        budget_bytes: for all resident models together. A model above it is resident alone. 0 means
            only the limit of the device, which also leads to evictions.
        loaded: models, by number, that were loaded before this process was forked.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], LoadedModel]],
        weights: Sequence[Path],
        budget_bytes: int = 0,
        loaded: Mapping[int, LoadedModel] | None = None,
    ) -> None:
        self._makers = makers
        self._budget_bytes = budget_bytes
        self._size_bytes = {
            number: memory.weights_bytes(path) for number, path in enumerate(weights)
        }
        self._estimate_bytes = dict(self._size_bytes)
        self._resident: OrderedDict[int, LoadedModel] = OrderedDict()  # least recently used first
        self._offloaded: dict[int, Offloaded] = {}
        self._loaded = dict(loaded or {})
        self._load_s: dict[int, float] = {}
        self._loaded_at_s: dict[int, float] = {}
        self._changes = ResidencyReport([])
        self.device_name = ""
        self.setup_s = 0.0
        self.warmup_s = 0.0

    def open(self) -> None:
        """Loads every model once, so that an invalid one is refused now.

        The first ones that fit stay.

        Evicted models are loaded once more to measure a switch, because a first load also imports
        libraries.

        Raises:
            PenstockError: a model can't be loaded.
        """
        for number in range(len(self._makers)):
            self.use(number)
        for number in reversed(range(len(self._makers))):
            self.use(number)

    def use(self, number: int) -> LoadedModel:
        """The model with this number, loaded if it is not resident.

        Raises:
            PenstockError: it can't be loaded.
        """
        if number not in self._resident:
            began_s = time.monotonic()
            self._load_within_budget(number)
            self._changes.switch_s += time.monotonic() - began_s
        self._resident.move_to_end(number)
        return self._resident[number]

    def loaded_at_s(self, number: int) -> float:
        """When the model with this number was last loaded, in Unix seconds. 0: never."""
        return self._loaded_at_s.get(number, 0.0)

    def _load_within_budget(self, number: int) -> None:
        self._make_room(self._size_bytes[number])
        try:
            model = self._load(number)
        except ConfigurationError:
            raise
        except Exception as error:
            # The boundary to the model libraries, which report a full device in many ways.
            if not self._resident:
                raise
            log.warning(
                "model could not be loaded beside others",
                extra={"model": number, "reason": str(error)},
            )
            self.evict_others(keep=number)
            model = self._load(number)
        self._make_room(self._size_bytes[number])
        self._resident[number] = model
        self._loaded_at_s[number] = time.time()
        self._changes.loads += 1

    def _load(self, number: int) -> LoadedModel:
        began_s, before_bytes = time.monotonic(), (memory.resident_bytes(), memory.gpu_bytes())
        offloaded = self._offloaded.get(number)
        model = self._from_disk(number) if offloaded is None else _restore(offloaded)
        self._load_s[number] = time.monotonic() - began_s
        if model.device_name == "cpu":
            # Files are mapped and read on demand, so a model grows up to their size.
            grown_bytes = memory.resident_bytes() - before_bytes[0]
            self._size_bytes[number] = max(grown_bytes, self._estimate_bytes[number])
        else:  # torch does not see the memory of other libraries, which keep the estimate
            grown_bytes = memory.gpu_bytes() - before_bytes[1]
            self._size_bytes[number] = (
                grown_bytes if grown_bytes > 0 else self._estimate_bytes[number]
            )
        return model

    def _from_disk(self, number: int) -> LoadedModel:
        is_first = number not in self._load_s
        model = self._loaded.pop(number, None)
        if model is None:
            began_s = time.monotonic()
            model = self._makers[number]()
            model.setup()
            self.setup_s += time.monotonic() - began_s
        self.device_name = self.device_name or model.device_name
        if is_first or model.device_name != "cpu":
            # Libraries on a CPU stay warm. Graphs and kernels on a GPU are gone with the model.
            began_s = time.monotonic()
            model.warmup()
            self.warmup_s += time.monotonic() - began_s
        return model

    def _make_room(self, size_bytes: int) -> None:
        while (
            self._budget_bytes
            and self._resident
            and size_bytes + self._taken_bytes() > self._budget_bytes
        ):
            self._evict_oldest()

    def _taken_bytes(self) -> int:
        return sum(self._size_bytes[number] for number in self._resident)

    def evict_others(self, keep: int) -> None:
        """Evicts all models but `keep`, because the device has less memory than the budget says."""
        while any(number != keep for number in self._resident):
            if next(iter(self._resident)) == keep:
                self._resident.move_to_end(keep)
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        number, model = self._resident.popitem(last=False)
        if model.device_name != "cpu":
            self._offload(number, model)
        del model
        memory.give_back(is_empty=not self._resident)
        self._changes.evictions += 1

    def _offload(self, number: int, model: LoadedModel) -> None:
        if (known := self._offloaded.get(number)) is not None:
            known.release()
        elif (offloaded := offload(model, memory.free_host_bytes())) is not None:
            self._offloaded[number] = offloaded

    def changes(self) -> ResidencyReport | None:
        """The loads and evictions since the last call, and the resident models.

        None if there were none.
        """
        changes, self._changes = self._changes, ResidencyReport([])
        if not changes.loads and not changes.evictions:
            return None
        changes.resident = list(self._resident)
        changes.load_s = {number: round(seconds, 6) for number, seconds in self._load_s.items()}
        changes.size_bytes = dict(self._size_bytes)
        return changes


def _restore(offloaded: Offloaded) -> LoadedModel:
    try:
        return offloaded.restore()
    except BaseException:
        offloaded.release()
        raise
