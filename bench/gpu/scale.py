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
    generations: tuple[int, ...]
    prompt_tokens: int
    written_tokens: int
    in_flight: tuple[int, ...]
    served_texts: int
    served_images: int
    joined_steps: int
    flow_side: int
    flow_steps: int
    flow_batches: tuple[int, ...]


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
    generations=(1, 8, 32),
    prompt_tokens=128,
    written_tokens=128,
    in_flight=(1, 128, 512),
    served_texts=6000,
    served_images=32,
    joined_steps=20,
    flow_side=1024,
    flow_steps=20,
    flow_batches=(1,),
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
    generations=(1, 2),
    prompt_tokens=8,
    written_tokens=4,
    in_flight=(1, 8),
    served_texts=16,
    served_images=2,
    joined_steps=5,
    flow_side=64,
    flow_steps=3,
    flow_batches=(1, 2),
)
