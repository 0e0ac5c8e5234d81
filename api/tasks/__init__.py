"""The tasks served by the API. Each file is named after its task in shared.models.tasks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from api.inputs.source_images import ImageCaller, SourceImages
from api.problem_details import errors_in_input
from api.tasks.base import ApiTask, Inputs
from shared.errors import BadInput
from shared.models.catalog import Model
from shared.models.tasks import TASKS

API_TASKS: dict[str, ApiTask] = {name: import_module(f"{__name__}.{name}").TASK for name in TASKS}
MAX_FIELDS = 100


async def read_inputs(
    raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
) -> Inputs:
    """Returns the inputs of one prediction.

    Args:
        raw_input: the body's `input`.
        caller: owner of the files that the input may refer to.
        images: fetches and stores images the input refers to.

    Raises:
        InvalidFields: a field is invalid.
        Overloaded: too many images are waiting to be decoded.
        DeadlineExceeded: the source image was not decoded in time.
        Unavailable: the object store is unreachable.
    """
    if len(raw_input) > MAX_FIELDS:
        raise BadInput(
            f"input: must have at most {MAX_FIELDS} fields, got {len(raw_input)}", field="input"
        )
    with errors_in_input():
        return await API_TASKS[model.task].read(raw_input, model, caller, images)


def openapi_schema_of(model: Model) -> dict[str, Any]:
    """Returns the input and output schemas in Cog's format. Clients build forms from them."""
    task = API_TASKS[model.task]
    schemas = {
        "Input": task.input_schema_of(model) | {"title": "Input"},
        "Output": {"title": "Output"} | task.output_schema_of(model),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": model.name, "version": model.revision},
        "paths": {},
        "components": {"schemas": schemas},
    }
