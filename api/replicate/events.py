"""A prediction's event stream and webhooks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from api.http.auth import Access
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD
from api.http.injection import authenticate, injectable
from api.http.middleware import context_of
from api.http.openapi import AUTHENTICATED_OR_LINKED, NOT_OVER, empty, event_stream
from api.http.recording import Recording
from api.http.router import Router
from api.http.streaming import answer_events, answer_head
from api.predictions.creation import PredictionSnapshot
from api.predictions.event_stream import (
    EXTRA_KINDS,
    KINDS,
    ElementEvents,
    EventStreams,
    OutputEvents,
)
from api.predictions.generation_stream import (
    GenerationStreams,
    logs_seen_from_id,
    parse_last_event_id,
)
from api.predictions.service import PredictionNotOver, Predictions
from api.problem_details import ProblemRoute
from api.replicate.replies import WebhookAttemptReply, WebhookAttempts
from api.tasks import API_TASKS
from api.tasks.base import StreamKind
from shared.errors import BadInput, UnknownModel
from shared.models.catalog import Catalog
from shared.predictions import EVENTS_TYPE, Prediction, iso, stream_key
from shared.stores.objects import UrlSigner
from shared.stores.webhook_log import WebhookLog
from shared.webhooks.publisher import WebhookPublisher

router = Router(scope="predictions", route_class=ProblemRoute, tags=["predictions"])

# Used only for the OpenAPI document. The routes do the validation, so that we control the wording
# of errors.
LinkExpiry = Annotated[int, Query(ge=0, le=2**53)]
ExtraEvents = Annotated[
    str,
    Query(
        description=f"Additional events that Replicate does not have: {', '.join(EXTRA_KINDS)}.",
        json_schema_extra={"pattern": f"^(({'|'.join(EXTRA_KINDS)})(,|$))*$"},
    ),
]


@router.get(
    "/predictions/{prediction_id}/webhooks",
    summary="List the deliveries of a webhook",
    reply=WebhookAttempts,
    reply_text="All attempts, oldest first.",
)
async def list_webhooks(
    call: Call, recording: Recording, webhook_log: WebhookLog, prediction_id: str
) -> Response:
    """Lists the attempts to deliver an event, with status or error.

    The last hundred attempts are kept.
    """
    snapshot = await recording.find(call, prediction_id)
    attempts = await webhook_log.read(snapshot.prediction.record)
    results = [
        WebhookAttemptReply(
            webhook_id=attempt.webhook_id,
            event=attempt.event,
            attempt=attempt.attempt,
            created_at=iso(attempt.at_s),
            duration_ms=round(attempt.duration_s * 1000, 3),
            status=attempt.status,
            error=attempt.error,
        )
        for attempt in attempts
    ]
    return encode_json(WebhookAttempts(results))


@router.post(
    "/predictions/{prediction_id}/webhooks/replay",
    summary="Deliver the last event again",
    status_code=202,
    response_class=Response,
    answers={202: empty("Delivery is scheduled.")},
    errors=(422, 429),
    conflict=NOT_OVER,
)
async def replay_webhook(
    call: Call,
    recording: Recording,
    webhook_log: WebhookLog,
    webhooks: WebhookPublisher,
    prediction_id: str,
) -> Response:
    """Sends `completed` again, with the same `webhook-id` and a new signature.

    Earlier events are not replayed, because their states no longer exist.
    """
    prediction, record = await recording.find(call, prediction_id)
    if "completed" not in prediction.webhook_events:
        raise BadInput(
            "webhook: the prediction has no webhook for its final event", field="webhook"
        )
    if not record.is_over:
        raise PredictionNotOver("the prediction has not finished, so there is nothing to replay")
    await webhook_log.start_replay(prediction.record)
    await webhooks.replay(prediction.record)
    return Response(status_code=202)


@injectable
class PredictionStreams:
    """Prediction streams, read from records or sent as the output is generated."""

    def __init__(
        self,
        catalog: Catalog,
        recording: Recording,
        predictions: Predictions,
        event_streams: EventStreams,
        generation_streams: GenerationStreams,
        url_signer: UrlSigner,
        access: Access,
    ) -> None:
        self.recording = recording
        self._catalog = catalog
        self._predictions = predictions
        self._event_streams = event_streams
        self._generation_streams = generation_streams
        self._url_signer = url_signer
        self._access = access

    async def find_linked(
        self, prediction_id: str, record: str, expires: int, signature: str
    ) -> tuple[PredictionSnapshot, Callable[[], None]]:
        """Returns the prediction a signed link points to, and a check to repeat while it streams.

        Raises:
            Forbidden: the signature is wrong, the link has expired, or its tenant is frozen.
            NotFound: the prediction has expired.
        """
        self._url_signer.check(stream_key(record), EVENTS_TYPE, expires, signature)
        snapshot = await self._predictions.read_linked(record, prediction_id)
        check = partial(self._access.check_tenant, snapshot.prediction.tenant)
        check()
        return snapshot, check

    def follow(
        self,
        snapshot: PredictionSnapshot,
        last_id: str,
        check: Callable[[], object],
        extra: set[str],
        held: ExitStack,
    ) -> AsyncGenerator[bytes]:
        """Returns the events after `last_id`, and reserves room for their stream in `held`.

        Raises:
            BadInput: the ID does not belong to this stream.
            Overloaded: there is no room for another stream.
        """
        prediction = snapshot.prediction
        kind = _stream_kind_of(self._catalog, prediction)
        if not kind:
            held.enter_context(self._event_streams.room.reserve(prediction.tenant))
            return self._event_streams.follow(snapshot, last_id, check, extra)
        seen, is_list = parse_last_event_id(last_id, 1), kind == "items"
        held.enter_context(self._generation_streams.room.reserve(prediction.tenant))
        return self._generation_streams.follow(
            snapshot,
            ElementEvents(prediction, self._url_signer) if is_list else OutputEvents(),
            seen,
            check,
            stays=True,
            has_ids=True,
            has_elements=is_list,
            logs_seen=logs_seen_from_id(last_id) if _prints(self._catalog, prediction) else None,
        )


@router.get(
    "/predictions/{prediction_id}/stream",
    summary="Stream a prediction",
    response_class=Response,
    takes=("Last-Event-ID",),
    answers={200: event_stream(*KINDS, *EXTRA_KINDS)},
    errors=(422, 429),
    openapi_extra=AUTHENTICATED_OR_LINKED,
)
async def stream(
    request: Request,
    streams: PredictionStreams,
    prediction_id: str,
    events: ExtraEvents = "",
    record: str = "",
    expires: LinkExpiry = 0,
    signature: str = "",
) -> Response:
    """Sends server-sent events: logs, output, error, and done. `Last-Event-ID` resumes a stream.

    With `events=preview`, also sends image previews between steps, as small WebP files. With
    `events=queue`, also sends the queue position whenever it changes. The link in `urls.stream` is
    signed and needs no API key. A text model's output is streamed as it is generated, without
    previews or queue positions.
    """
    if signature and not _sends_key(request):
        snapshot, check = await streams.find_linked(prediction_id, record, expires, signature)
        context_of(request).facts.tenant = snapshot.prediction.tenant
    else:
        call = authenticate(request)
        snapshot, check = await streams.recording.find(call, prediction_id), call.check_key
    extra = _extra_kinds(events)
    last_id = request.headers.get("last-event-id", "")
    with ExitStack() as held:
        sse = streams.follow(snapshot, last_id, check, extra, held)
        return answer_head() if IS_HEAD in request.scope else answer_events(sse, held)


def _stream_kind_of(catalog: Catalog, prediction: Prediction) -> StreamKind:
    """Returns how the prediction's output is streamed as it is generated.

    Empty if the output can only be sent as a whole.
    """
    with suppress(UnknownModel):  # model removed from the catalog, so only the record remains
        model = catalog.find(prediction.model)
        return "" if prediction.is_list else API_TASKS[model.task].streams(model)
    return ""


def _prints(catalog: Catalog, prediction: Prediction) -> bool:
    """Returns whether the prediction's model prints text; only custom models do."""
    return catalog.find(prediction.model).definition.has_interface


def _sends_key(request: Request) -> bool:
    """Returns whether the request has a key.

    If it does, the key determines access, and an invalid key is an error.
    """
    return "authorization" in request.headers or "x-api-key" in request.headers


def _extra_kinds(events: str) -> set[str]:
    extra = set(filter(None, events.split(",")))
    if unknown := sorted(extra - {*EXTRA_KINDS}):
        known = ", ".join(EXTRA_KINDS)
        reason = f"events: unknown event {unknown[0][:40]!r}; must be one of {known}"
        raise BadInput(reason, field="events")
    return extra
