"""Scale of the GPU benchmark: full for CUDA, or tiny for a CPU (takes less than a minute)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """The sizes of one run. `precision` applies to the plain models."""

    device: str = "cuda"
    precision: str = "fp16"
    is_full_width: bool = True
    side: int = 512
    batches: tuple[int, ...] = (1, 8)
    compiled: int = 8
    """The largest batch of images that is compiled. Each size up to this one takes up to a minute
    to compile.
    """
    text_steps: int = 25
    image_steps: int = 50
    flux_side: int = 1024
    flux_steps: int = 20
    rounds: int = 3
    matrix: int = 8192
    batch_tokens: tuple[int, ...] = (2_048, 8_192, 32_768, 131_072)
    """Number of tokens in one batch for an embedding model."""
    pass_tokens: int = 262_144
    """Number of tokens in one timed pass over all batches."""
    shared_s: float = 20.0
    in_flight: tuple[int, ...] = (1, 128, 1024)
    """Number of concurrent requests with one text each."""
    in_flight_many: tuple[int, ...] = (1, 32, 128)
    """Number of concurrent requests with many texts each."""
    served_texts: int = 12_000
    served_alone: int = 500
    """Number of texts sent one after another."""
    warm_up_texts: int = 2_000
    more_processes: int = 3
    """Number of APIs and workers in addition to the first ones."""
    served_images: int = 32
    joined_steps: int = 20


FULL = Scale()
TINY = Scale(
    device="cpu",
    precision="fp32",
    is_full_width=False,
    side=64,
    batches=(1, 2),
    compiled=2,
    text_steps=2,
    image_steps=4,
    flux_side=64,
    flux_steps=3,
    rounds=1,
    matrix=256,
    batch_tokens=(64,),
    pass_tokens=128,
    shared_s=0.2,
    in_flight=(1, 8),
    in_flight_many=(1,),
    served_texts=128,
    served_alone=8,
    warm_up_texts=16,
    more_processes=1,
    served_images=2,
    joined_steps=5,
)
