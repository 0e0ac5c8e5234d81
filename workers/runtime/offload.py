"""Moves the weights of a model out of GPU memory into pinned host memory, and back.

Restoring by copy is about twenty times faster than loading from disk. Only models with plain
parameters can be offloaded. A compiled model or a CUDA graph contains their addresses, and a
quantized model hides them in other objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from workers.models.base import LoadedModel

_DEPTH = 6
"""How deep to look for networks: model, encoder or pipeline, list or dict, network."""


class Offloaded:
    """A model whose weights are in host memory. Made by `offload`.

    Args:
        model: complete except for its weights.
        tensors: its weights and buffers, without duplicates.
        copies: their contents, in host memory.
    """

    def __init__(self, model: LoadedModel, tensors: list[Any], copies: list[Any]) -> None:
        self._model = model
        self._tensors = tensors
        self._copies = copies
        self._devices = [tensor.device for tensor in tensors]
        self.size_bytes = sum(copy.nbytes for copy in copies)

    def release(self) -> None:
        """Replaces the weights by the copies, which frees GPU memory. Weights never change."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.data = copy

    def restore(self) -> LoadedModel:
        """Copies the weights back to their device.

        Raises:
            RuntimeError: there is no room. Some weights may be restored. Call `release` then.
        """
        for tensor, copy, device in zip(self._tensors, self._copies, self._devices, strict=True):
            tensor.data = copy.to(device, copy=True, non_blocking=True)
        _finish_copies()
        return self._model


def offload(model: LoadedModel, room_bytes: int) -> Offloaded | None:
    """Copies the weights of `model` to host memory, and frees them on the GPU.

    Returns None and changes nothing if the weights can't be moved, or need more than `room_bytes`.
    """
    if "torch" not in sys.modules:  # another library computes and owns the weights
        return None
    networks = list(_networks(vars(model), _DEPTH))
    tensors = list({id(one): one for network in networks for one in _weights(network)}.values())
    # The allocator of pinned memory rounds up to powers of two.
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
    """All torch modules reachable through our own objects, diffusers pipelines, lists and dicts."""
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
