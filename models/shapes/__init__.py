"""A small Stable Diffusion that draws coloured shapes as told: its world, its training, its judge and the result."""
