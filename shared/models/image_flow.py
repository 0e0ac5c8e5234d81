"""The steps in an image request that is checked or upscaled, as configured in the model's entry.

The catalog creates these flows; they are not in any file (docs/decisions/0113-after-the-image.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.models.blob import FILE_FORMAT
from shared.models.entry import CatalogEntry
from shared.models.flow_plan import FlowPlan
from shared.models.flow_types import FlowError, StepSchema, check_flow, misfit

IMAGE, SAFETY, UPSCALE = "image", "safety", "upscale"
"""Step IDs. The first step draws."""
SCALES = (2, 4)
"""Factors by which an image may be enlarged."""
MAX_IMAGES = 10
"""Maximum number of images per request."""
_FILE = {"type": "string", "format": FILE_FORMAT}
_INPUT = {"drawings": ["object"], "upscale": "integer"}
"""As in ImagesInput.step_value."""


def plan_of_images(entry: CatalogEntry, *, upscales: bool) -> FlowPlan | None:
    """Returns an image request's steps, or None if it has a single step and needs no flow.

    Args:
        upscales: True if the request asks for larger images.
    """
    safety, upscale = entry.image.safety, entry.image.upscale if upscales else None
    if safety is None and upscale is None:
        return None
    own = {"drawing": "$item"}
    steps: list[dict[str, Any]] = [
        {"id": IMAGE, "model": entry.name, "for_each": "$input.drawings", "input": own}
    ]
    output: dict[str, Any] = {"images": f"${IMAGE}"}
    if safety is not None:
        fields: dict[str, Any] = {"image": "$item"}
        if safety.threshold is not None:
            fields |= {"threshold": safety.threshold}
        check = {"id": SAFETY, "model": safety.model, "for_each": f"${IMAGE}", "input": fields}
        steps.append(check)
        output["are_safe"] = f"${SAFETY}.is_safe"
    if upscale is not None:
        lists = {"image": f"${IMAGE}"}
        step = {"id": UPSCALE, "model": upscale.model, "for_each": lists}
        step["input"] = {"image": "$item.image", "scale": "$input.upscale"}
        if safety is not None:
            lists["safety"] = f"${SAFETY}"
            step["when"] = "$item.safety.is_safe == true"
        steps.append(step)
        output["images"] = f"${UPSCALE}"
    steps = [{**step, "max_items": MAX_IMAGES} for step in steps]
    return FlowPlan.model_validate(
        {"input": _INPUT, "steps": steps, "output": output, "gives": "images"}
    )


def check_steps(entry: CatalogEntry, find: Callable[[str], StepSchema | None]) -> None:
    """Checks the models named in an entry.

    Raises:
        FlowError: a model does not exist, or does not have the required inputs and output.
    """
    plan = plan_of_images(entry, upscales=True)
    if plan is None:
        return
    own = StepSchema({"type": "object", "properties": {"drawing": {}}}, _FILE)
    try:
        output = check_flow(plan, lambda name: own if name == entry.name else find(name))
    except FlowError as error:
        _, number, field, *_ = (*error.place, "")
        place = plan.steps[int(number)].id if isinstance(number, int) else SAFETY
        where = ("image", place, "model") if field == "model" else ("image", place)
        raise FlowError(where, str(error)) from error
    shapes = output["properties"]
    if reason := misfit(shapes["images"], {"type": "array", "items": _FILE}):
        raise FlowError(("image", UPSCALE), f"the model's output: {reason}")
    booleans = {"type": "array", "items": {"type": "boolean"}}
    if "are_safe" in shapes and (reason := misfit(shapes["are_safe"], booleans)):
        raise FlowError(("image", SAFETY), f"is_safe, from the model's output: {reason}")
    if entry.image.upscale is not None:
        _check_scales(entry.image.upscale.model, find)
    if entry.image.safety is not None and entry.canary is not None:
        reason = (
            "a canary receives no flow steps, so it would receive no requests for this "
            "model; remove one of the two"
        )
        raise FlowError(("image", SAFETY), reason)


def _check_scales(name: str, find: Callable[[str], StepSchema | None]) -> None:
    schema = find(name)
    shape = {} if schema is None else schema.inputs["properties"]["scale"]
    for scale in SCALES:
        if reason := misfit({"type": "integer", "const": scale}, shape):
            raise FlowError(("image", UPSCALE), f"scale: {reason} (required by {name})")
