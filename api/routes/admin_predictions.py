"""/v1/admin/predictions: why any tenant's prediction is slow, failed, or costs what it does.

Only for keys with the `admin` scope. Operators don't see inputs, outputs, or logs. Error messages
are left out too, because they may quote the input.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from starlette.responses import Response

from api.errors import NotFound
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.router import Router
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import Predictions
from api.replicate.replies import Count, Moment, PredictionTimes
from shared.messages import decode_reply_body
from shared.predictions import iso, metrics_of, read_ended_at_s
from shared.stores.record_state import Record, State, receipts_of

_RECORD_ID = re.compile(r"pred_[0-9a-f]{24}|own_[0-9a-f]{32}")


class AdminPrediction(msgspec.Struct, kw_only=True):
    """Any tenant's prediction, without its input, output, and logs."""

    id: str
    """The ID that the tenant uses."""
    request_id: str
    """The ID in rows, logs, and the `errors` report."""
    tenant: str
    model: str
    version: str
    deployment: str | None
    endpoint: str | None
    """Path of the endpoint that created it. Null: created as a prediction."""
    api_key_id: str | None
    status: State
    attempts: Count
    """How many times a worker has started the prediction."""
    error_code: str | None
    """The first error's code, as in rows."""
    metrics: PredictionTimes
    worker: str | None
    """The worker that finished it."""
    device: str | None
    created_at: Moment
    started_at: Moment | None
    completed_at: Moment | None
    deadline: Moment
    object: Literal["prediction"] = "prediction"


router = Router(scope="admin", prefix="/v1/admin/predictions", tags=["admin"])


@router.get("/{request_id}", summary="Get a prediction of any tenant", reply=AdminPrediction)
async def get_prediction(_call: Call, predictions: Predictions, request_id: str) -> Response:
    """Returns a prediction's state, times, attempts, error code, and cost.

    Its input, output, logs, and error message are not shown.
    """
    if not _RECORD_ID.fullmatch(request_id):
        raise NotFound(f"prediction {request_id[:80]!r} does not exist")
    snapshot = await predictions.read_of_any_tenant(request_id)
    return encode_json(_describe(snapshot), headers={"cache-control": "no-store"})


def _describe(snapshot: PredictionSnapshot) -> AdminPrediction:
    prediction, record = snapshot
    reply = record.reply
    measured = metrics_of(prediction, _without_results(record))
    return AdminPrediction(
        id=prediction.id,
        request_id=prediction.record,
        tenant=prediction.tenant,
        model=prediction.model,
        version=prediction.version,
        deployment=prediction.deployment or None,
        endpoint=prediction.endpoint or None,
        api_key_id=prediction.key_id or None,
        status=record.state,
        attempts=record.attempts,
        error_code=_error_code(record),
        metrics=msgspec.convert(measured, PredictionTimes),
        worker=(reply.worker or None) if reply else None,
        device=(reply.device or None) if reply else None,
        created_at=iso(prediction.created_at_s),
        started_at=iso(record.started_at_s) if record.started_at_s else None,
        completed_at=iso(read_ended_at_s(record)) if record.is_over else None,
        deadline=iso(prediction.deadline_s),
    )


def _without_results(record: Record) -> Record:
    """Returns the record without results, which may include metrics chosen by the model."""
    if record.reply is None:
        return record
    return msgspec.structs.replace(record, reply=decode_reply_body(receipts_of(record.reply)))


def _error_code(record: Record) -> str | None:
    if record.reply is None:
        return None
    errors = [record.reply.error, *(outcome.error for outcome in record.reply.outcomes)]
    return next((error.code for error in errors if error is not None), None)
