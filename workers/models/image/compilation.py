"""torch.compile for a fixed set of shapes: compiled (on a GPU: recorded as CUDA graphs) at warm-up, never later.

A graph writes its result to the same memory each time, so what leaves here is a copy; and a graph is good for one
layout and type of its inputs, so what enters is made uniform.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir


def keep_compiled_in(folder: Path) -> None:
    """Keeps what Inductor and Triton generate in `folder`, so that the next start finds it.

    An operator's TORCHINDUCTOR_CACHE_DIR goes first, and where the folder can't be made, torch's temporary one stays.
    """
    # Importing diffusers has set the variable already, to the default.
    if cache_dir() != default_cache_dir():
        return
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def only_what_is_compiled() -> contextlib.AbstractContextManager[None]:
    """While it is entered, shapes that were not met at warm-up run eagerly instead of being compiled for minutes."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("eager_on_recompile")
    return stance


def compile_parts(unet: Any, vae: Any, *, shapes: int, backend: str = "inductor") -> None:
    """Replaces the forwards of UNet, VAE encoder and VAE decoder by compiled ones.

    Args:
        unet: of diffusers, as `vae`.
        vae: decodes and encodes image by image from now on.
        shapes: how many each of them will meet at warm-up.
        backend: of torch.compile.
    """
    # A shape is a recompilation to Dynamo, which gives up after so many, counted over all models of the process.
    torch._dynamo.config.recompile_limit += shapes
    unet.forward = _unet_forward(_compiled(unet.forward, unet.device, backend))
    # Image by image: one shape for every batch, and one image fills a GPU at this point.
    vae.enable_slicing()
    for part in (vae.encoder, vae.decoder):
        part.forward = _single_input_forward(_compiled(part.forward, vae.device, backend))


def _compiled(forward: Callable[..., Any], device: torch.device, backend: str) -> Callable[..., Any]:
    # "reduce-overhead" is what torch calls CUDA graphs.
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    return torch.compile(forward, backend=backend, mode=mode, dynamic=False)


def _unet_forward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor, **rest: Any) -> Any:
        # Schedulers give integers or floats, on either device; the UNet computes with their fp32 value anyway.
        times = torch.as_tensor(timestep, dtype=torch.float32).to(sample.device).expand(len(sample)).contiguous()
        _begin_step()
        return _copied(compiled(sample.contiguous(), times, encoder_hidden_states.contiguous(), **rest))

    return forward


def _single_input_forward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> Any:
        _begin_step()
        return _copied(compiled(given.contiguous()))

    return forward


def _begin_step() -> None:
    """Lets the graphs write over what the last call returned, which was copied."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    return tuple(part.clone() for part in output)
