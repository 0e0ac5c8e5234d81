"""One model process's models: an LRU cache with a memory budget.

On a CPU, an evicted model is loaded from disk again. On a GPU, an evicted model is moved to pinned
host memory if possible.

Also measures the memory use of the process and the machine, and returns unused memory.

Restoring a model from a copy is about twenty times faster than loading it from disk. Only models
with plain parameters can be offloaded, because compiled models and CUDA graphs contain the
parameters' addresses, and quantized models hide their parameters in other objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from shared.errors import ConfigurationError
from workers.models.base import InferenceModel, LoadedModel, OverlappingModel
from workers.models.reports import ResidencyReport

_DEPTH = 6
"""Maximum depth when searching for networks: model, encoder or pipeline, list or dict, network."""

_PAGE_BYTES = resource.getpagesize()
_SUFFIXES = (".safetensors", ".bin", ".pt", ".onnx")

log = logging.getLogger(__name__)


class Offloaded:
    """A model whose weights have been moved to host memory. Created by `offload`.

    Args:
        model: the model, complete except for its weights.
        tensors: its weights and buffers, without duplicates.
        copies: the tensors' contents, in host memory.
    """

    def __init__(self, model: LoadedModel, tensors: list[Any], copies: list[Any]) -> None:
        self._model = model
        self._tensors = tensors
        self._copies = copies
        self._devices = [tensor.device for tensor in tensors]
        self.size_bytes = sum(copy.nbytes for copy in copies)

    def release(self) -> None:
        """Replaces the weights with the copies, which frees GPU memory.

        This is safe because the weights never change.
        """
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.data = copy

    def restore(self) -> LoadedModel:
        """Copies the weights back to their device.

        Raises:
            RuntimeError: there is not enough memory. Some weights may already have been restored,
                so call `release`.
        """
        for tensor, copy, device in zip(self._tensors, self._copies, self._devices, strict=True):
            tensor.data = copy.to(device, copy=True, non_blocking=True)
        _finish_copies()
        return self._model


def offload(model: LoadedModel, room_bytes: int) -> Offloaded | None:
    """Copies the weights of `model` to host memory, and frees them on the GPU.

    Returns None and changes nothing if the weights can't be moved, or exceed `room_bytes`.
    """
    if "torch" not in sys.modules:  # another library owns the weights and runs the model
        return None
    networks = list(_networks(vars(model), _DEPTH))
    tensors = list(
        {id(tensor): tensor for network in networks for tensor in _weights(network)}.values()
    )
    # The pinned memory allocator rounds up to powers of two.
    needed = 2 * sum(tensor.nbytes for tensor in tensors)
    if not tensors or needed > room_bytes or not all(_is_movable(network) for network in networks):
        return None
    try:
        copies = [_host_copy(tensor) for tensor in tensors]
    except RuntimeError:  # the system can pin less memory than is free
        return None
    offloaded = Offloaded(model, tensors, copies)
    offloaded.release()
    return offloaded


def _networks(values: Mapping[str, Any], depth: int) -> Iterator[Any]:
    """Yields torch modules reachable through our objects, diffusers pipelines, lists, and dicts."""
    torch = sys.modules["torch"]
    for value in values.values():
        if isinstance(value, torch.nn.Module):
            yield value
        elif depth and (below := _below(value)):
            yield from _networks(below, depth - 1)


def _below(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))  # type: ignore[arg-type]
    if hasattr(value, "components") and hasattr(value, "__dict__"):
        return dict(value.components)
    return (
        vars(value)
        if type(value).__module__.startswith("workers.") and hasattr(value, "__dict__")
        else {}
    )


def _weights(network: Any) -> Iterable[Any]:
    yield from network.parameters()
    yield from network.buffers()


def _is_movable(network: Any) -> bool:
    torch = sys.modules["torch"]
    plain = (torch.nn.Parameter, torch.Tensor)
    for part in network.modules():
        # A compiled part has its own `forward`.
        if (
            "forward" in vars(part)
            or part._compiled_call_impl is not None
            or hasattr(part, "_orig_mod")
        ):
            return False
    return all(
        type(tensor) in plain and type(tensor.data) is torch.Tensor for tensor in _weights(network)
    )


def _host_copy(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    copy = torch.empty_like(tensor.data, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.data)


def _finish_copies() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except FileNotFoundError:  # not on Linux; other systems report only peak memory use
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def gpu_bytes() -> int:
    """Returns the GPU memory allocated by torch for tensors in this process."""
    torch = _torch_with_gpu()
    return (
        sum(torch.cuda.memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
        if torch
        else 0
    )


def weights_bytes(root: Path) -> int:
    """Returns the total size of weight files: `root` itself, or files under it in one format."""
    files = [path for path in (root, *root.rglob("*")) if path.is_file()]
    sums = (
        sum(path.stat().st_size for path in files if path.suffix == suffix) for suffix in _SUFFIXES
    )
    return next(filter(None, sums), 0)


def free_host_bytes() -> int:
    """Returns the memory that is free without swapping, taking any cgroup limit into account."""
    free = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(
            int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
        )
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # `max` means no limit
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    return max(0, min(free, default=0))


def give_back(*, is_empty: bool) -> None:
    """Returns freed memory to the operating system.

    `is_empty`: True if no models are loaded, so all remaining objects are permanent.
    """
    gc.collect()
    if is_empty:
        # libraries create 300,000 objects, and collecting them takes a quarter of a second
        gc.freeze()
    torch = _torch_with_gpu()
    if torch is not None:
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _torch_with_gpu() -> Any:
    """Returns torch if it has been imported and uses a GPU. Doesn't import it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


class ResidentModels:
    """Loads models when they are used.

    Args:
        makers: functions that each create a model without loading it. A model's number is its index
            here.
        weights: each model's weights file or folder, used to estimate its size before the first
            load.
        budget_bytes: total limit for all resident models. A model larger than that must be the only
            resident model. If 0, only the device's own limit applies, which also causes evictions.
        loaded: models that were loaded before this process was forked, keyed by number.
        more_weights: additional files that models load, keyed by model number. Included in the
            estimate.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], LoadedModel]],
        weights: Sequence[Path],
        budget_bytes: int = 0,
        loaded: Mapping[int, LoadedModel] | None = None,
        more_weights: Mapping[int, Sequence[Path]] | None = None,
    ) -> None:
        self._makers = makers
        self._budget_bytes = budget_bytes
        more = more_weights or {}
        self._size_bytes = {
            number: sum(weights_bytes(file) for file in (path, *more.get(number, ())))
            for number, path in enumerate(weights)
        }
        self._estimate_bytes = dict(self._size_bytes)
        self._resident: OrderedDict[int, LoadedModel] = OrderedDict()  # least recently used first
        self._offloaded: dict[int, Offloaded] = {}
        self._loaded = dict(loaded or {})
        self._load_s: dict[int, float] = {}
        self._loaded_at_s: dict[int, float] = {}
        self._changes = ResidencyReport([])
        self.overlaps: set[int] = set()
        """The models that compute two batches at a time."""
        self.device_name = ""
        self.setup_s = 0.0
        self.warmup_s = 0.0

    def open(self) -> None:
        """Loads every model once, so that an invalid model is rejected right away.

        The first models that fit stay loaded.

        Evicted models are loaded a second time to measure the switch time, because during the first
        load, libraries were imported too.

        Raises:
            PenstockError: a model can't be loaded.
        """
        for number in range(len(self._makers)):
            self.use(number)
        for number in reversed(range(len(self._makers))):
            self.use(number)

    def use(self, number: int) -> LoadedModel:
        """Returns the model with this number, loading it if it is not resident.

        Raises:
            PenstockError: the model can't be loaded.
        """
        if number not in self._resident:
            began_s = time.monotonic()
            self._load_within_budget(number)
            self._changes.switch_s += time.monotonic() - began_s
        self._resident.move_to_end(number)
        return self._resident[number]

    def overlapping(self, number: int) -> InferenceModel | None:
        """Returns this model if it is resident and computes two batches at a time."""
        if number not in self.overlaps or number not in self._resident:
            return None
        return cast(InferenceModel, self.use(number))

    def loaded_at_s(self, number: int) -> float:
        """Returns when this model was last loaded, in Unix seconds, or 0 if it never was."""
        return self._loaded_at_s.get(number, 0.0)

    def _load_within_budget(self, number: int) -> None:
        self._make_room(self._size_bytes[number])
        try:
            model = self._load(number)
        except ConfigurationError:
            raise
        except Exception as error:
            # The boundary with the model libraries, which report a full device in various ways.
            if not self._resident:
                raise
            log.warning(
                "model could not be loaded alongside others",
                extra={"model": number, "reason": str(error)},
            )
            self.evict_others(keep=number)
            model = self._load(number)
        self._make_room(self._size_bytes[number])
        self._resident[number] = model
        if isinstance(model, OverlappingModel) and model.overlaps:
            self.overlaps.add(number)
        self._loaded_at_s[number] = time.time()
        self._changes.loads += 1

    def _load(self, number: int) -> LoadedModel:
        began_s, before_bytes = time.monotonic(), (resident_bytes(), gpu_bytes())
        offloaded = self._offloaded.get(number)
        model = self._from_disk(number) if offloaded is None else _restore(offloaded)
        self._load_s[number] = time.monotonic() - began_s
        if model.device_name == "cpu":
            # Files are mapped and read on demand, so a model can grow to the size of its files.
            grown_bytes = resident_bytes() - before_bytes[0]
            self._size_bytes[number] = max(grown_bytes, self._estimate_bytes[number])
        else:  # torch doesn't see other libraries' memory, so their models keep the estimate
            grown_bytes = gpu_bytes() - before_bytes[1]
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
            # On a CPU, libraries stay warm. On a GPU, graphs and kernels disappear with the model.
            began_s = time.monotonic()
            model.warmup()
            self.warmup_s += time.monotonic() - began_s
        return model

    def _make_room(self, size_bytes: int) -> None:
        while (
            self._budget_bytes
            and self._resident
            and size_bytes + self._count_taken_bytes() > self._budget_bytes
        ):
            self._evict_oldest()

    def _count_taken_bytes(self) -> int:
        return sum(self._size_bytes[number] for number in self._resident)

    def evict_others(self, keep: int) -> None:
        """Evicts all models except `keep`, because the device has less memory than the budget."""
        while any(number != keep for number in self._resident):
            if next(iter(self._resident)) == keep:
                self._resident.move_to_end(keep)
            self._evict_oldest()

    def evict(self, numbers: Sequence[int]) -> None:
        """Evicts these models, if resident, because other models need the memory."""
        for number in numbers:
            if number in self._resident:
                self._resident.move_to_end(number, last=False)
                self._evict_oldest()

    def _evict_oldest(self) -> None:
        number, model = self._resident.popitem(last=False)
        if model.device_name != "cpu":
            self._offload(number, model)
        del model
        give_back(is_empty=not self._resident)
        self._changes.evictions += 1

    def _offload(self, number: int, model: LoadedModel) -> None:
        if (known := self._offloaded.get(number)) is not None:
            known.release()
        elif (offloaded := offload(model, free_host_bytes())) is not None:
            self._offloaded[number] = offloaded

    def changes(self) -> ResidencyReport | None:
        """Returns the loads and evictions since the last call, and the resident models.

        None if nothing has changed.
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
