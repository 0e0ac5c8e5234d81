"""Which options of a request a pipeline takes. What it does not take is refused by name."""

from __future__ import annotations

from typing import Any

import diffusers

from shared.diffusion_schedulers import OWN_SCHEDULER, SCHEDULER_NAMES
from shared.errors import BadInput
from workers.models.base import PreparedImage
from workers.models.image.families import load_family


class OptionCheck:
    """Checks the options of items against a pipeline.

    Args:
        pipeline: the one for text. One of no known family takes negative prompts, or ignores them.
    """

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._family = load_family(pipeline)
        self._schedulers = _schedulers_of(pipeline.scheduler)

    def refusal(self, item: PreparedImage) -> BadInput | None:
        """Returns why the pipeline can't draw an item. None if it can."""
        if item.scheduler not in self._schedulers:
            known = " or ".join(map(repr, self._schedulers))
            return BadInput(f"this model takes only scheduler {known}", field="scheduler")
        takes = {"negative_prompt"} if self._family is None else self._family.options
        for name in ("negative_prompt", "clip_skip", "guidance_rescale"):
            if getattr(item, name) and name not in takes:
                return BadInput(f"{name}: this model takes none; leave it out", field=name)
        if self._family is None:
            return None
        if item.clip_skip:
            most = self._family.max_clip_skip(self._pipeline)
            if item.clip_skip > most:
                reason = f"clip_skip {item.clip_skip} is above {most}, the most of this model"
                return BadInput(reason, field="clip_skip")
        return self._family.refusal(self._pipeline, item)


def _schedulers_of(own: Any) -> tuple[str, ...]:
    """The names of requests that stand for a scheduler which can take the place of `own`."""
    if isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler):
        return (OWN_SCHEDULER, "euler")
    is_flow = own.config.get("prediction_type") == "flow_prediction"
    return SCHEDULER_NAMES if "beta_start" in own.config and not is_flow else (OWN_SCHEDULER,)
