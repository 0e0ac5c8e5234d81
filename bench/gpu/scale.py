"""Scale of the GPU benchmark: full for CUDA, or tiny for a CPU in under a minute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Sizes of one run. `precision` is that of the plain models."""

    device: str
    precision: str
    is_full_width: bool
    side: int
    batches: tuple[int, ...]
    text_steps: int
    image_steps: int
    rounds: int
    matrix: int
    lengths: tuple[int, ...]
    tokens: int
    shared_s: float


FULL = Scale(
    device="cuda",
    precision="fp16",
    is_full_width=True,
    side=512,
    batches=(1, 2, 4, 8, 16),
    text_steps=25,
    image_steps=50,
    rounds=3,
    matrix=8192,
    lengths=(32, 128, 512),
    tokens=32768,
    shared_s=20.0,
)
TINY = Scale(
    device="cpu",
    precision="fp32",
    is_full_width=False,
    side=64,
    batches=(1, 2),
    text_steps=2,
    image_steps=4,
    rounds=1,
    matrix=256,
    lengths=(16,),
    tokens=64,
    shared_s=0.2,
)
