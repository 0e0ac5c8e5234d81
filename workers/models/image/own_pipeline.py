"""A pipeline for each item: a copy of a loaded one, whose modules are shared through the hub.

A copy has its own scheduler and state. In place of each module it has a stand-in, which hands calls
to the hub and everything else to the module. So the modules themselves are not touched: they may be
compiled, quantized and moved as before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ModelMixin

from workers.models.image.calls import Part
from workers.models.image.hub import Hub

_MOVES = frozenset({"to", "half", "float", "bfloat16", "cuda", "cpu", "eval", "train"})
"""Methods that change a module as a whole. It is as it was loaded, for all items."""


class Shared:
    """Stands for a module that all items share, in the pipeline of one of them.

    Args:
        module: of a pipeline.
        hub: gets its calls.
        parts: what is intercepted, by method. Empty: the call itself.
    """

    def __init__(self, module: Any, hub: Hub, parts: Mapping[str, Part]) -> None:
        self.__dict__.update(
            _module=module,
            _ask=hub.ask,
            _part=parts.get(""),
            **{name: functools.partial(self._ask_part, part) for name, part in parts.items() if name},
        )

    @property
    def __class__(self) -> Any:
        """That of the module, which pipelines ask about."""
        return type(self.__dict__["_module"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hands a call to the hub."""
        if self._part is None:
            return self._module(*args, **kwargs)
        return self._ask(self._part, args, kwargs)

    def _ask_part(self, part: Part, *args: Any, **kwargs: Any) -> Any:
        # A VAE may be in fp32 beside a denoiser in 16 bits.
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            args = (args[0].to(self._module.dtype), *args[1:])
        return self._ask(part, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVES:
            return lambda *args, **kwargs: self
        return getattr(self.__dict__["_module"], name)


def is_denoiser(name: str, module: Any) -> bool:
    """Returns whether a component of a pipeline is what its steps call."""
    if not isinstance(module, ModelMixin) or hasattr(module, "decode"):
        return False
    return not any(word in name for word in ("controlnet", "encoder", "connector", "adapter"))


class Interception:
    """Makes pipelines for items whose modules call a hub.

    Args:
        hub: gets the calls.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._shared: dict[int, Shared] = {}
        self.denoisers: list[Any] = []

    def own(self, pipeline: Any, scheduler: Any | None = None) -> Any:
        """Returns a copy of a pipeline for one item.

        Args:
            pipeline: loaded.
            scheduler: of the item. None: a new one with the settings of the pipeline's.
        """
        mine = copy.copy(pipeline)
        # Pipelines write what is set otherwise into their settings, which all copies share.
        for name, module in pipeline.components.items():
            if isinstance(module, torch.nn.Module):
                object.__setattr__(mine, name, self._share(name, module))
        kept = getattr(pipeline, "scheduler", None)
        if scheduler is None and kept is not None:
            scheduler = type(kept).from_config(kept.config)
        object.__setattr__(mine, "scheduler", scheduler)
        return mine

    def _share(self, name: str, module: Any) -> Shared:
        known = self._shared.get(id(module))
        if known is None:
            known = Shared(module, self._hub, self._parts(name, module))
            self._shared[id(module)] = known
        return known

    def _parts(self, name: str, module: Any) -> dict[str, Part]:
        if hasattr(module, "encode") and hasattr(module, "decode"):
            return {
                method: Part(f"{name}.{method}", module, getattr(module, method))
                for method in ("encode", "decode")
            }
        steps = is_denoiser(name, module)
        if steps:
            self.denoisers.append(module)
        return {"": Part(name, module, module, is_denoiser=steps)}
