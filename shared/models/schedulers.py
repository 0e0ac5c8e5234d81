"""Short names for diffusion schedulers in image requests, and each one's diffusers class.

This module contains only names, so that the API can validate a request without a model library.
workers/models/image/model.py creates the schedulers. Replicate's names and the class names are
aliases for the short names.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

OWN_SCHEDULER = "default"
"""Selects the scheduler named in the model's folder (the only one for flow-matching models)."""

_OF_REPLICATE = {
    "DDIM": "ddim",
    "PNDM": "pndm",
    "KLMS": "lms",
    "K_EULER": "euler",
    "K_EULER_ANCESTRAL": "euler_a",
    "HeunDiscrete": "heun",
    "DPMSolverMultistep": "dpmpp_2m",
    "KarrasDPM": "dpmpp_2m_karras",
}


class Scheduler(NamedTuple):
    """A diffusers class, its options in addition to the pipeline's settings, and its steps."""

    class_name: str
    options: Mapping[str, str | bool] = MappingProxyType({})
    steps_max: int | None = None


SCHEDULERS: dict[str, Scheduler] = {
    "ddim": Scheduler("DDIMScheduler"),
    "ddpm": Scheduler("DDPMScheduler"),
    "pndm": Scheduler("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": Scheduler("LMSDiscreteScheduler"),
    "euler": Scheduler("EulerDiscreteScheduler"),
    "euler_a": Scheduler("EulerAncestralDiscreteScheduler"),
    "heun": Scheduler("HeunDiscreteScheduler"),
    "dpm2": Scheduler("KDPM2DiscreteScheduler"),
    "dpm2_a": Scheduler("KDPM2AncestralDiscreteScheduler"),
    "dpmpp_2m": Scheduler("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "dpmpp_2m_karras": Scheduler(
        "DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True}
    ),
    "dpmpp_2m_sde": Scheduler("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_2s": Scheduler("DPMSolverSinglestepScheduler"),
    "deis": Scheduler("DEISMultistepScheduler"),
    "unipc": Scheduler("UniPCMultistepScheduler"),
    "lcm": Scheduler("LCMScheduler", steps_max=50),
}

SCHEDULER_NAMES = (OWN_SCHEDULER, *SCHEDULERS)

_OF_DIFFUSERS = {choice.class_name: name for name, choice in reversed(SCHEDULERS.items())}
"""Maps each class to its first short name, which has the fewest custom options."""
SCHEDULER_ALIASES: Mapping[str, str] = MappingProxyType(_OF_REPLICATE | _OF_DIFFUSERS)
"""Short names, keyed by alias."""
