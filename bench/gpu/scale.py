"""Scale of the GPU benchmark: full for CUDA, or tiny for a CPU in under a minute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """The sizes of one run. `precision` applies to the plain models."""

    device: str = "cuda"
    precision: str = "fp16"
    is_full_width: bool = True
    side: int = 512
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    text_steps: int = 25
    image_steps: int = 50
    rounds: int = 3
    matrix: int = 8192
    lengths: tuple[int, ...] = (32, 128, 512)
    tokens: int = 32768
    shared_s: float = 20.0
    in_flight: tuple[int, ...] = (1, 128, 512)
    served_texts: int = 6000
    served_images: int = 32
    joined_steps: int = 20
    flow_side: int = 1024
    flow_steps: int = 20
    flow_batches: tuple[int, ...] = (1,)


FULL = Scale()
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
    in_flight=(1, 8),
    served_texts=16,
    served_images=2,
    joined_steps=5,
    flow_side=64,
    flow_steps=3,
    flow_batches=(1, 2),
)
