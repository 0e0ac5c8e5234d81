"""Calls to shared modules: which ones can share a batch, and how they are joined and split.

Tensors whose first dimension equals the call's row count are concatenated along it. Everything else
must be the same for all calls in a batch. A one-element timestep is expanded to one per row,
because its type and shape vary by scheduler, and otherwise items with different schedulers could
not share batches.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from transformers import Cache

_TIMES = frozenset({"timestep", "timesteps", "t"})
"""Names of the timestep parameter in denoisers."""
_UNUSED = frozenset({"generator"})
"""Parameters that only ConsistencyDecoderVAE's decoder reads. Each item has a separate generator.
"""
_LIMIT_DIGESTS = 64
"""Maximum number of digests kept per item. A denoiser has a handful of constant tensors."""


class UnsplittableError(Exception):
    """The joined calls' results contain something that can't be split by row."""


class Digests:
    """Digests of the tensors that stay constant across one item's calls.

    Reading a tensor requires waiting for the device, so each tensor is read once rather than at
    every step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, bytes]] = {}

    def of(self, tensor: torch.Tensor) -> bytes:
        """Returns the digest of a tensor's contents. The tensor must not change between calls."""
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        contents = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        digest = hashlib.blake2b(contents.tobytes(), digest_size=16).digest()
        if len(self._known) >= _LIMIT_DIGESTS:
            self._known.clear()
        self._known[id(tensor)] = tensor, digest
        return digest


class Part:
    """A shared module's function that items call, such as the denoiser or the VAE decoder.

    Args:
        name: the module's name in its pipeline, plus the method unless it is the call itself.
        module: the module shared by all items.
        is_denoiser: True if each call is one step of an item.
    """

    def __init__(
        self, name: str, module: Any, compute: Callable[..., Any], *, is_denoiser: bool = False
    ) -> None:
        self.name = name
        self.module = module
        self.compute = compute
        self.is_denoiser = is_denoiser
        self.constants: set[str] = set()
        """Argument positions where earlier calls had tensors whose first dimension was not the row
        count.

        If it matches in another call, that is just a coincidence.
        """
        # A compiled module has its own `forward`, which hides the parameter names.
        called = type(module).forward if isinstance(compute, torch.nn.Module) else compute
        parameters = inspect.signature(called).parameters.values()
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [
            parameter.name
            for parameter in parameters
            if parameter.kind in named and parameter.name != "self"
        ]
        self._defaults = {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.default is not parameter.empty
        }

    def hook_ids(self) -> tuple[int, ...]:
        """Returns the IDs of the hooks in a text encoder.

        Some pipelines add a hook for the time of a call. It must not see other items' rows.
        """
        if isinstance(self.module, ModelMixin):
            return ()
        return tuple(
            hook_id
            for module in self.module.modules()
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
            for hook_id in hooks
        )

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a call's arguments by name, omitting those with default values."""
        values = dict(zip(self._names, args, strict=False))
        values.update(kwargs)
        defaults = self._defaults
        return {
            name: value
            for name, value in values.items()
            if not (name in defaults and value is defaults[name]) and name not in _UNUSED
        }


class Call:
    """A call waiting for its results.

    Args:
        owner: the item, which the code that runs the call can query.
    """

    __slots__ = (
        *("part", "owner", "values", "rows", "key", "added"),
        *("is_halved", "is_listed", "_fixed"),
    )

    def __init__(
        self,
        part: Part,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        digests: Digests,
        owner: Any = None,
    ) -> None:
        self.part = part
        self.owner = owner
        self._fixed: set[int] = set()
        """IDs of tensors that are constant even though their length equals the row count."""
        self.is_halved = False
        """True if the negative prompt's row is omitted and the other row's result is used for it.
        """
        self.added: Sequence[torch.Tensor] = ()
        """ControlNet residuals for the call's rows: one per down block, then one for the middle
        block.
        """
        values = part.values(args, kwargs)
        first = next(
            (value for value in values.values() if isinstance(value, torch.Tensor | list)), None
        )
        self.is_listed = isinstance(first, list)
        """True if the denoiser takes lists with one tensor per row, as Z-Image's does."""
        self.rows = _count_rows(first)
        self.values = {
            name: _times(value, self.rows) if name in _TIMES else value
            for name, value in values.items()
        }
        for name, value in self.values.items():
            self._mark_constants(value, name)
        kinds = {name: self._kind(value, digests) for name, value in self.values.items()}
        named_kinds = tuple(sorted(kinds.items()))
        self.key: Hashable = (id(part), part.hook_ids(), self.is_listed, named_kinds)

    def _mark_constants(self, value: Any, place: str) -> None:
        """Records which tensors are constant, for this call and for later calls to this part."""
        if isinstance(value, torch.Tensor):
            if value.dim() and value.shape[0] != self.rows:
                self.part.constants.add(place)
            elif place in self.part.constants:
                self._fixed.add(id(value))
        elif isinstance(value, Mapping):
            for name, element in value.items():
                self._mark_constants(element, f"{place}.{name}")
        elif isinstance(value, list | tuple) and not self.is_row_list(value):
            for at, element in enumerate(value):
                self._mark_constants(element, f"{place}.{at}")

    def _kind(self, value: Any, digests: Digests) -> Hashable:
        """Returns the properties that must match before two values can be joined."""
        if isinstance(value, torch.Tensor):
            if self.has_rows(value):
                return value.dtype, tuple(value.shape[1:])
            return value.dtype, tuple(value.shape), digests.of(value)
        if value is None or isinstance(value, bool | int | float | str):
            return type(value), value
        if isinstance(value, Mapping):
            return dict, tuple(
                (name, self._kind(element, digests)) for name, element in sorted(value.items())
            )
        if self.is_row_list(value):
            return list, value[0].dtype, value[0].dim(), tuple(value[0].shape[-1:])
        if isinstance(value, list | tuple):
            return type(value), tuple(self._kind(element, digests) for element in value)
        return type(value), id(value)

    def has_rows(self, value: torch.Tensor) -> bool:
        """Returns whether a tensor has one row for each row of the call."""
        return value.dim() > 0 and value.shape[0] == self.rows and id(value) not in self._fixed

    def is_row_list(self, value: Any) -> bool:
        """Returns whether a value is a list with one tensor per row."""
        return (
            self.is_listed
            and isinstance(value, list)
            and len(value) == self.rows
            and all(isinstance(row, torch.Tensor) for row in value)
        )

    def last_rows(self, count: int) -> None:
        """Keeps only the last `count` rows.

        The key stays the same, because it doesn't depend on the rows.
        """
        self.values = {name: self._last_rows(value, count) for name, value in self.values.items()}
        self.rows = count

    def _last_rows(self, value: Any, count: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value[-count:] if self.has_rows(value) else value
        if isinstance(value, Mapping):
            return {name: self._last_rows(element, count) for name, element in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._last_rows(element, count) for element in value)
        return value


def _count_rows(first: torch.Tensor | list[Any] | None) -> int:
    """Returns a call's row count, based on its first tensor or list."""
    if first is None or (isinstance(first, torch.Tensor) and not first.dim()):
        return 1
    return len(first)


def _times(value: Any, rows: int) -> Any:
    """Returns one timestep per row, as floats.

    Pipelines round timesteps to 16-bit types, which are kept.
    """
    if value is None or (isinstance(value, torch.Tensor) and value.dim() > 1):
        return value
    if not isinstance(value, torch.Tensor):
        return torch.full((rows,), float(value))
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        value = value.float()
    return value.reshape(1).expand(rows) if value.numel() == 1 else value


@dataclass(slots=True)
class Batch:
    """Joined calls that have the same key."""

    calls: Sequence[Call]
    every: Sequence[Call]
    """The calls, with the last one repeated for each row of padding up to a compiled size."""
    values: dict[str, Any]

    @property
    def rows(self) -> int:
        """Total number of rows in all calls."""
        return sum(call.rows for call in self.every)

    @property
    def row_calls(self) -> list[Call]:
        """For each row in the batch, the call that it belongs to."""
        return [call for call in self.every for _ in range(call.rows)]


def join(calls: Sequence[Call], fill: int = 0) -> Batch:
    """Joins calls that have the same key.

    Args:
        calls: at least one call.
        fill: how many times to repeat the last call, to fill a larger compiled batch.
    """
    every = [*calls, *[calls[-1]] * fill]
    values = {
        name: _join_values([call.values[name] for call in every], every[0])
        for name in every[0].values
    }
    if times := _TIMES & values.keys():
        device = _device_of(values)
        for name in times:
            if isinstance(values[name], torch.Tensor):
                values[name] = values[name].to(device, non_blocking=True)
    return Batch(calls, every, values)


def _device_of(values: Mapping[str, Any]) -> torch.device:
    for name, value in values.items():
        if name not in _TIMES:
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, torch.Tensor):
                return first.device
    return torch.device("cpu")


def _join_values(values: Sequence[Any], first: Call) -> Any:
    value = values[0]
    if isinstance(value, torch.Tensor):
        if len(values) > 1 and first.has_rows(value):
            return torch.cat(list(values))
        return value
    if isinstance(value, Mapping):
        return {name: _join_values([mapping[name] for mapping in values], first) for name in value}
    if first.is_row_list(value):
        return [row for rows in values for row in rows]
    if isinstance(value, list | tuple):
        return type(value)(_join_values(elements, first) for elements in zip(*values, strict=True))
    return value


def split(output: Any, batch: Batch) -> list[Any]:
    """Splits a batch's results into results for each call.

    Raises:
        UnsplittableError: the results contain something other than rows, such as a custom cache.
    """
    if len(batch.calls) == 1 and batch.rows == batch.calls[0].rows:
        return [output]
    is_listed = batch.calls[0].is_listed
    results, at, total = [], 0, batch.rows
    for call in batch.calls:
        rows = _Rows(at, at + call.rows, total, is_listed)
        results.append(_cut(output, rows))
        at += call.rows
    return results


class _Rows(NamedTuple):
    """The rows of a batch that has `rows` rows in total.

    `is_listed`: True if lists have one tensor per row.
    """

    begin: int
    end: int
    rows: int
    is_listed: bool


def _cut_tensor(value: torch.Tensor, of: _Rows) -> torch.Tensor:
    length = value.shape[0] if value.dim() else 0
    if length == of.rows:
        return value[of.begin : of.end]
    if length and length % of.rows == 0:  # possibly several entries per row
        raise UnsplittableError(f"tensor of length {length} for {of.rows} rows")
    return value


def _cut(value: Any, of: _Rows) -> Any:
    if isinstance(value, torch.Tensor):
        return _cut_tensor(value, of)
    if isinstance(value, DiagonalGaussianDistribution):
        parameters: torch.Tensor = value.parameters
        return DiagonalGaussianDistribution(parameters[of.begin : of.end], value.deterministic)
    if of.is_listed and isinstance(value, list) and len(value) == of.rows:
        return value[of.begin : of.end]
    if isinstance(value, Mapping):
        # Both libraries return mappings that are constructed with keyword arguments.
        changed = {name: _cut(element, of) for name, element in value.items()}
        return type(value)(**changed) if is_dataclass(value) else changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(element, of) for element in value))
    if isinstance(value, list | tuple):
        return type(value)(_cut(element, of) for element in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{name: _cut(element, of) for name, element in named.items()})
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Cache):
        # Text encoders return keys and values for all rows, but no pipeline needs them.
        return None
    raise UnsplittableError(type(value).__name__)
