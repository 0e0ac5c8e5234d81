"""torch.compile for a fixed set of shapes.

Compiles (and on a GPU records CUDA graphs) only during warm-up. A batch of equal images is split
into compiled batch sizes at the lowest cost.

A graph always writes its result to the same memory, so results are copied. A graph requires its
inputs to have a specific layout and type, so they are converted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.utils._pytree import tree_map_only


def cheapest_cover(count: int, seconds: Mapping[int, float]) -> list[int]:
    """Returns the number of images to draw per call so that drawing `count` images costs the least.

    The last call may be larger than needed, if padding costs less than another call.

    Args:
        count: at least 1.
        seconds: the cost of a call, keyed by number of rows.

    Returns:
        The number of images in each call, largest first. They add up to `count`.
    """
    cost, choice = [0.0], [0]
    for remaining in range(1, count + 1):
        best, size = min(
            (cost[max(0, remaining - size)] + cost_s, size) for size, cost_s in seconds.items()
        )
        cost.append(best)
        choice.append(size)
    sizes = []
    while count > 0:
        sizes.append(min(choice[count], count))
        count -= choice[count]
    return sorted(sizes, reverse=True)


def keep_compiled_in(folder: Path) -> None:
    """Caches the output of Inductor and Triton in `folder` for the next startup.

    TORCHINDUCTOR_CACHE_DIR takes precedence. If the folder can't be created, torch uses a temporary
    folder.
    """
    # Importing diffusers has already set this variable to its default.
    if cache_dir() != default_cache_dir():
        return
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def only_what_is_compiled() -> contextlib.AbstractContextManager[None]:
    """Within this context, new shapes run eagerly instead of taking minutes to compile."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance(
        "eager_on_recompile"
    )
    return stance


@dataclass(slots=True)
class EagerCalls:
    """Counts calls to compiled parts that ran eagerly because no compiled code fit their inputs."""

    count: int = 0


def compile_parts(denoiser: Any, vae: Any, *, shapes: int, backend: str = "inductor") -> EagerCalls:
    """Compiles the denoiser, VAE encoder, and VAE decoder.

    Args:
        denoiser: takes all inputs by keyword, the way the hub passes them.
        vae: a diffusers VAE, which from now on processes images one at a time.
        shapes: number of shapes that warm-up uses with each part.
    """
    calls = EagerCalls()
    parts = (denoiser, vae.encoder, vae.decoder)
    # Each new shape requires a recompilation. Dynamo's limit applies to all models in the process,
    # and to all parts together, because what it compiles is always _compile's inner function.
    torch._dynamo.config.recompile_limit += shapes * len(parts)
    # Processing one image at a time means one shape for all batches, and a single image keeps a GPU
    # busy here.
    vae.enable_slicing()
    for part in parts:
        device = denoiser.device if part is denoiser else vae.device
        part.forward = _graph_of(_compile(part.forward, device, backend, calls))
    return calls


def _compile(
    forward: Callable[..., Any], device: torch.device, backend: str, calls: EagerCalls
) -> Callable[..., Any]:
    def compute(*inputs: Any, **named: Any) -> Any:
        # Compiled code doesn't contain this branch.
        if not torch.compiler.is_compiling():
            calls.count += 1
        return forward(*inputs, **named)

    # "reduce-overhead" means CUDA graphs.
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    return torch.compile(compute, backend=backend, mode=mode, dynamic=False)


def _graph_of(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*inputs: Any, **named: Any) -> Any:
        # The graphs may overwrite the last result, because it has already been copied.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return _copy(compiled(*_uniform(inputs), **_uniform(named)))

    return forward


def _uniform(values: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.contiguous, values)


def _copy(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    return tuple(part.clone() for part in output)
