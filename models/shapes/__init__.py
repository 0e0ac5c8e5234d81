"""A small Stable Diffusion for colored shapes: world, training, judge and result."""

from pathlib import Path

PIPELINE = Path(__file__).parent / "pipeline"
"""The trained pipeline, a diffusers folder."""
