"""A small Stable Diffusion that draws colored shapes as told: its world, its training, its judge and the result."""

from pathlib import Path

PIPELINE = Path(__file__).parent / "pipeline"
"""The trained pipeline, a diffusers folder."""
