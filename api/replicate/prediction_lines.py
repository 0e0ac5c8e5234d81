"""Batch lines that are flow runs or predictions of a custom model.

The body is the same as for POST /v1/predictions. The response is a successful prediction without
the fields that only a record has. Links would expire before a batch's results are read, so output
files are included as `data:` URIs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
from pydantic import Field, ValidationError

from api.batches.endpoint import Endpoint, LineCaller, LineRequest, ReplyTools
from api.bodies import Body
from api.errors import to_bad_input
from api.predictions.creation import OWNER, find_version, version_of
from api.tasks.base import check_results
from api.tasks.custom import (
    add_files,
    max_values_bytes,
    store_large_values,
    validate_input,
)
from shared.errors import BadInput, ModelFailed, Unavailable
from shared.messages import ItemOutcome
from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.tasks.custom import CustomInput, CustomResult, stores_files
from shared.money.charge import cost_usd

MAX_OUTPUT_FILES_BYTES = 4 * 1024 * 1024
"""Maximum total size, in bytes, of the files in one response, because a whole segment of lines is
held in memory.
"""
PREDICTIONS_PATH = "/v1/predictions"
_REPLY_BYTES, _REPLY_WITH_FILES_BYTES = 64 * 1024, 1024 * 1024
_ACCEPTED = ("data:", "https://", "http://", "file-")


class PredictionLine(Body):
    """A line's body."""

    version: str = Field(min_length=1, max_length=512)
    input: dict[str, Any]


class PredictionsEndpoint(Endpoint):
    """Batch lines with the same body as POST /v1/predictions, for custom models and flows."""

    def read(self, data: bytes, catalog: Catalog, default_seed: int) -> LineRequest:
        """Returns one item. The line's files are loaded when the line runs."""
        body = PredictionLine.model_validate_json(data, strict=True)
        model = find_version(catalog, body.version)
        if not model.definition.has_interface:
            raise BadInput(
                f"version: {model.name} has its own endpoint; use predictions in batches only "
                "for custom models and flows",
                field="version",
            )
        try:
            custom_input, files = validate_input(body.input, model, max_values_bytes(model))
        except (ValidationError, BadInput) as error:
            raise _in_input(error) from error
        for at, url in files:
            if not url.startswith(_ACCEPTED):
                raise BadInput(
                    f"input.{at[0]}: must be a data: URI, an https URL, or the ID or URL of a "
                    "file uploaded to this API",
                    field=f"input.{at[0]}",
                )
        reply_bytes = _REPLY_WITH_FILES_BYTES if stores_files(model) else _REPLY_BYTES
        custom_input.is_streamed = False
        return LineRequest(body, model, [custom_input], bool(model.cache.ttl_s), reply_bytes)

    async def inputs(self, request: LineRequest, caller: LineCaller) -> Sequence[CustomInput]:
        """Loads the line's files, and stores large values.

        This happens on each attempt, but an unchanged file is not loaded again.
        """
        body = cast(PredictionLine, request.body)
        custom_input, files = validate_input(
            body.input, request.model, max_values_bytes(request.model)
        )
        custom_input.is_streamed = False
        owner = caller.file_owner("input")
        try:
            await add_files(custom_input, files, owner, caller.source_images)
            await store_large_values(custom_input, request.model, caller.source_images, owner)
        except BadInput as error:
            raise _in_input(error) from error
        return [custom_input]

    async def reply(
        self, request: LineRequest, outcomes: Sequence[ItemOutcome], tools: ReplyTools
    ) -> bytes:
        """Returns the prediction with its output files as `data:` URIs."""
        (outcome,) = outcomes
        (result,) = check_results([outcome.result], CustomResult, request.model)
        files: list[Blob] = []
        for blob in result.blobs:
            left_bytes = MAX_OUTPUT_FILES_BYTES - sum(len(file.data or b"") for file in files)
            files.append(await _load_blob(blob, left_bytes, tools))
        took_ms = outcome.receipt.inference_ms
        times = {} if took_ms is None else {"predict_time": round(took_ms / 1000, 6)}
        own = {**times, "cost_usd": cost_usd(tools.price, outcome)}
        reply_fields = {
            "model": f"{OWNER}/{request.model.name}",
            "version": version_of(request.model),
            "status": "succeeded",
            "output": result.with_blobs(files).to_output("", lambda key, media_type="": ""),
            "logs": "" if outcome.logs is None else outcome.logs.after(0),
            "error": None,
            "metrics": {**result.recorded_metrics, **(tools.run_metrics or own)},
        }
        return msgspec.json.encode(reply_fields)


async def _load_blob(blob: Blob, left_bytes: int, tools: ReplyTools) -> Blob:
    data = blob.data
    try:
        if blob.object_key is not None:
            data = await tools.objects.get(blob.object_key, left_bytes)
    except BadInput as error:
        if error.code == BadInput.code:
            raise Unavailable("an output file no longer exists", public="try again") from error
        data = None
    if data is None or len(data) > left_bytes:
        raise ModelFailed(
            f"output: total file size exceeds the maximum of {MAX_OUTPUT_FILES_BYTES} bytes "
            "for a response in a batch; create a prediction instead, which returns links to "
            "its files"
        )
    return Blob(blob.media_type, data=data)


def _in_input(error: ValidationError | BadInput) -> BadInput:
    """Returns the same error, but for a field inside `input`."""
    wrong = to_bad_input(error) if isinstance(error, ValidationError) else error
    if wrong.field in (None, "input"):
        return wrong
    return type(wrong)(f"input.{wrong.message}", field=f"input.{wrong.field}")
