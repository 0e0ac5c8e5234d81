"""One pipeline per item: a copy of the loaded pipeline, with modules shared through the hub.

A copy has its own scheduler and state. In place of each module, it has a stand-in that passes calls
to the hub and everything else to the module. The modules themselves aren't touched, so they can
still be compiled, quantized, and moved.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from functools import lru_cache, partial
from typing import Any, cast

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict

from workers.models.image.calls import Part
from workers.models.image.hub import Hub
from workers.models.image.pipeline import inner_pipelines

_MOVES = frozenset({"to", "half", "float", "bfloat16", "cuda", "cpu", "eval", "train"})
"""Methods that would change a whole module. All items use the module as it was loaded."""
_OF_FOUR_CHANNELS = frozenset(
    {"StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline"}
)


class Shared:
    """Replaces a shared module in one item's pipeline.

    Args:
        parts: the intercepted parts, keyed by method. An empty name stands for calling the module
            itself.
        settings: `config` values that differ from the module's own.
        shift: value added to the latents before decoding.
    """

    def __init__(
        self,
        module: Any,
        hub: Hub,
        parts: Mapping[str, Part],
        *,
        settings: Mapping[str, Any] | None = None,
        shift: float = 0.0,
    ) -> None:
        self.__dict__.update(
            _module=module,
            _ask=hub.ask,
            _part=parts.get(""),
            _shift=shift,
            **{name: partial(self._ask_vae, part) for name, part in parts.items() if name},
        )
        for name in ("config", "device", "dtype"):
            # Looking these up through modules is slow, because that searches all of the modules'
            # parts.
            if hasattr(module, name):
                self.__dict__[name] = getattr(module, name)
        if settings:
            self.__dict__["config"] = FrozenDict({**module.config, **settings})

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The module's class, which pipelines check for."""
        return type(self.__dict__["_module"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Passes a call to the hub."""
        if self._part is None:
            return self._module(*args, **kwargs)
        return self._ask(self._part, args, kwargs)

    def _ask_vae(self, part: Part, images: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(images, torch.Tensor) and images.is_floating_point():
            # A VAE may use fp32 while the denoiser uses 16-bit precision.
            images = images.to(self.dtype)
            if self._shift and part.name.endswith(".decode"):
                images = images + self._shift
        return self._ask(part, (images, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVES:
            return lambda *args, **kwargs: self
        module = self.__dict__["_module"]
        if name == "text_model" and not hasattr(module, name):
            # diffusers 0.42 looks for this level in CLIP, but transformers 5 removed it.
            return module
        return getattr(module, name)


def state_of(pipeline: Any) -> tuple[Any, ...]:
    """Returns the module parts that pipelines may change around calls: hooks and processors.

    If these change while an item is being drawn, the item's pipeline can't share modules with
    others.
    """
    return tuple(
        (
            id(getattr(part, "processor", None)),
            len(part._forward_hooks),
            len(part._forward_pre_hooks),
            "forward" in vars(part),
        )
        for module in pipeline.components.values()
        # transformers adds hooks to text encoders on their first call.
        if isinstance(module, ModelMixin)
        for part in module.modules()
    )


def is_denoiser(name: str, module: Any) -> bool:
    """Returns whether a pipeline's component is one that its steps call."""
    if not isinstance(module, ModelMixin) or hasattr(module, "decode"):
        return False
    return not any(word in name for word in ("controlnet", "encoder", "connector", "adapter"))


@lru_cache(maxsize=256)
def _own_kind(kind: Any) -> Any:
    """Returns a pipeline class whose items don't search every part for offloaded modules."""

    def device_of(pipeline: Any) -> Any:
        return pipeline._own_device

    def free_nothing(pipeline: Any) -> None:
        """Does nothing, because an item never offloads a shared model's modules."""

    own = {
        "device": property(device_of),
        "_execution_device": property(device_of),
        "maybe_free_model_hooks": free_nothing,
    }
    return type(kind.__name__, (kind,), own)


class Interception:
    """Creates per-item pipelines whose modules call a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._shared: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, dict[str, Part]] = {}

    def own(self, pipeline: Any, scheduler: Any | None = None) -> Any:
        """Returns a copy of a pipeline for one item.

        Args:
            scheduler: the item's scheduler. None means a new scheduler with the same settings as
                the pipeline's own.
        """
        mine = copy.copy(pipeline)
        mine.__class__ = _own_kind(cast("Hashable", type(pipeline)))
        # Pipelines write changed values to their settings, which all copies share.
        for name, shared in self._find_shared_attributes(pipeline).items():
            object.__setattr__(mine, name, shared)
        own_scheduler = getattr(pipeline, "scheduler", None)
        if scheduler is None and own_scheduler is not None:
            scheduler = type(own_scheduler).from_config(own_scheduler.config)
        object.__setattr__(mine, "scheduler", scheduler)
        for name, inner in inner_pipelines(pipeline).items():
            is_last = inner.scheduler is own_scheduler
            object.__setattr__(mine, name, self.own(inner, scheduler if is_last else None))
        return mine

    def _find_shared_attributes(self, pipeline: Any) -> dict[str, Any]:
        """Returns a pipeline's device, which takes milliseconds to find, and its stand-ins."""
        known = self._shared.get(id(pipeline))
        if known is None:
            known = self._shared[id(pipeline)] = {
                name: self.stand_in(name, module, **_corrections(pipeline, name, module))
                for name, module in pipeline.components.items()
                if isinstance(module, torch.nn.Module)
            }
            known["_own_device"] = pipeline.device
        return known

    def stand_in(self, name: str, module: Any, **corrections: Any) -> Shared:
        """Returns the stand-in that passes a module's calls to the hub."""
        parts = self._parts.setdefault(id(module), _parts_of(name, module))
        return Shared(module, self._hub, parts, **corrections)


def _parts_of(name: str, module: Any) -> dict[str, Part]:
    if hasattr(module, "encode") and hasattr(module, "decode"):
        return {
            method: Part(f"{name}.{method}", module, getattr(module, method))
            for method in ("encode", "decode")
        }
    return {"": Part(name, module, module, is_denoiser=is_denoiser(name, module))}


def _corrections(pipeline: Any, name: str, module: Any) -> dict[str, Any]:
    """Returns how a stand-in differs from its component, depending on the pipeline class."""
    kind = type(pipeline).__name__
    if kind in _OF_FOUR_CHANNELS and name == "unet":
        # These pipelines support any number of latent channels, but check for four.
        channels = pipeline.vae.config.latent_channels
        return {"settings": {"in_channels": 4}} if module.config.in_channels == channels else {}
    if kind == "StableDiffusion3InpaintPipeline" and name == "vae":
        # The pipeline omits the shift when decoding (diffusers 0.42.1).
        return {"shift": module.config.shift_factor or 0.0}
    return {}
