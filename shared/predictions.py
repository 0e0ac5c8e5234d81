"""A prediction's document and the body shown to callers, in Replicate's format.

The API returns this body, and the webhook function posts it. Both build it from the document and
the record, so the results match. Field names and states follow Replicate's HTTP API
(https://replicate.com/docs/reference/http).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.errors import Unavailable
from shared.messages import ItemOutcome, PrintedLogs, Receipt, decode_reply_body, reason_of
from shared.models.flow_plan import MAX_STEP_ITEMS, step_of
from shared.models.image_flow import SAFETY
from shared.models.tasks import Result
from shared.models.tasks.custom import (
    CustomResult,
    PieceChunk,
    StreamedFile,
    build_streamed_key,
    read_elements,
    with_places,
)
from shared.models.tasks.image import ImageResult, ImagesResult
from shared.money.charge import ItemPrice, cost_usd, device_s
from shared.stores.objects import UrlSigner
from shared.stores.record_state import Record, State, receipts_of
from shared.stores.stream_chunks import Chunk
from shared.stores.token_streams import TokenStreams
from shared.stores.waiting_lines import QueuePosition

MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp"}
"""Media types, keyed by API output format. Workers produce PNG."""
EVENTS_TYPE = "text/event-stream"
STREAM_LINK_S = 600
"""How long a link to a prediction's events remains valid after the deadline, in seconds."""
BAR_WIDTH = 10


class Prediction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The document in a prediction's record: the request that created it. It never changes.

    `record` identifies the record, the job's request, and the rows. It equals `id` if the API chose
    the ID. If the caller chose the ID, `record` is different, because two tenants can choose the
    same ID.
    """

    id: str
    record: str
    tenant: str
    model: str
    """Model name in the catalog."""
    owner: str
    version: str
    input: dict[str, Any]
    """The caller's input, with any source image replaced by a file's URL."""
    is_list: bool = True
    """True if the output is a list. False if the output is the only element of the list."""
    output_format: str = "png"
    webhook: str = ""
    webhook_events: tuple[str, ...] = ()
    deployment: str = ""
    source: str = "api"
    endpoint: str = ""
    """OpenAI API path that created the prediction. Empty if it was created as a prediction."""
    base_url: str
    """The API's URL as used by the caller, without a trailing slash."""
    created_at_s: float
    deadline_s: float
    """Unix time after which no more work is done on the prediction."""
    digest: str = ""
    """Hash of the whole request. A repeated request has the same hash.

    Empty if the request can't be repeated because the caller chose neither an ID nor a key.
    """
    client_request_id: str = ""
    """`x-request-id` of the request that created the prediction, used in rows."""
    key_id: str = ""
    """Public part of the API key that created the prediction, used in rows."""
    is_cached: bool = False
    """True if results may be served from the cache."""
    price: ItemPrice | None = None
    """The prediction's pricing terms. None if it was created by a release that did not store them.
    """
    streams: str = ""
    """The way a custom class's output grows while it runs: `text` or `items`.

    Empty if the output doesn't grow, or if the prediction was created by a release that didn't
        record this.
    """
    flow: dict[str, Any] | None = None
    """For a flow, its plan (shared/models/flow_plan.py)."""
    step_prices: tuple[ItemPrice, ...] = ()
    """The pricing terms for each step's items."""

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """A flow's steps. Empty if this is not a flow."""
        return self.flow["steps"] if self.flow else ()

    @property
    def shows_steps(self) -> bool:
        """True for a flow, unless it is an image request."""
        return bool(self.steps) and not (self.flow or {}).get("gives")

    @property
    def is_checked(self) -> bool:
        """True if images are checked before delivery, in which case previews are not shown."""
        return not self.shows_steps and any(step["id"] == SAFETY for step in self.steps)

    def price_of(self, outcome: ItemOutcome) -> ItemPrice | None:
        return self.step_prices[step_of(outcome.index)] if self.step_prices else self.price


_decoder = msgspec.json.Decoder(Prediction)


def encode_document(prediction: Prediction) -> bytes:
    return msgspec.json.encode(prediction)


def decode_document(document: bytes) -> Prediction:
    """Parses a document.

    Raises:
        MALFORMED (shared/errors.py): the data is not a prediction document.
    """
    return _decoder.decode(document)


class _End(msgspec.Struct, omit_defaults=True):
    """Data kept from a deleted prediction until its webhook has been notified that it finished."""

    prediction: Prediction
    state: State
    created_at_s: float
    started_at_s: float = 0.0
    ended_at_s: float = 0.0
    canceled_at_s: float = 0.0
    receipts: bytes = b""


def encode_end(prediction: Prediction, record: Record) -> bytes:
    """Returns a prediction's final state without its input and output."""
    return msgspec.json.encode(
        _End(
            msgspec.structs.replace(prediction, input={}),
            record.state,
            record.created_at_s,
            record.started_at_s,
            record.ended_at_s,
            record.canceled_at_s,
            b"" if record.reply is None else receipts_of(record.reply),
        )
    )


def decode_end(data: bytes) -> tuple[Prediction, Record]:
    """Parses the result of `encode_end`.

    Raises:
        MALFORMED (shared/errors.py): the data has a different format.
        UndecodableMessage: its receipts have a different format.
    """
    end = msgspec.json.decode(data, type=_End)
    record = Record(
        state=end.state,
        reply=decode_reply_body(end.receipts) if end.receipts else None,
        created_at_s=end.created_at_s,
        started_at_s=end.started_at_s,
        ended_at_s=end.ended_at_s,
        canceled_at_s=end.canceled_at_s,
    )
    return end.prediction, record


def record_of(tenant: str, own_id: str) -> str:
    """Returns the record ID for a caller-chosen ID.

    The record ID is 128 bits of BLAKE2b (RFC 7693) over the tenant and ID.
    """
    digest = hashlib.blake2b(f"{tenant}\n{own_id}".encode(), digest_size=16)
    return f"own_{digest.hexdigest()}"


def inline_key(record: str, index: int) -> str:
    """Returns the key used in links for an image stored in the record itself."""
    return f"predictions/{record}/{index}.png"


def stream_key(record: str) -> str:
    """Returns the key used in links for a prediction's events."""
    return f"streams/{record}"


def body_of(
    prediction: Prediction,
    record: Record,
    url_signer: UrlSigner,
    queue: QueuePosition | None = None,
    *,
    partial: list[Any] | None = None,
    is_deleted: bool = False,
) -> dict[str, Any]:
    """Returns the prediction as shown to callers, ready for JSON.

    Args:
        url_signer: signs large images' URLs, which are valid for an hour from now.
        queue: queue position, if known.
        partial: output so far (`read_partial`), if it is not in the record.
        is_deleted: True if the data is deleted, as in the result of `encode_end`.
    """
    url = f"{prediction.base_url}/v1/predictions/{prediction.id}"
    output: Any = None
    if not is_deleted:
        output = partial or output_of(prediction, record, url_signer)
    return {
        "id": prediction.id,
        "model": f"{prediction.owner}/{prediction.model}",
        "version": prediction.version,
        "deployment": prediction.deployment or None,
        "source": prediction.source,
        "endpoint": prediction.endpoint or None,
        "status": record.state,
        "input": prediction.input,
        "output": output,
        "logs": logs_of(record),
        "error": error_of(record),
        "metrics": metrics_of(prediction, record),
        "queue": None if queue is None else queue._asdict(),
        "data_removed": is_deleted,
        "created_at": iso(prediction.created_at_s),
        "started_at": iso(record.started_at_s) if record.started_at_s else None,
        "completed_at": iso(read_ended_at_s(record)) if record.is_over else None,
        "deadline": iso(prediction.deadline_s),
        "urls": {
            "get": url,
            "cancel": f"{url}/cancel",
            "stream": f"{url}/stream?{_stream_query(prediction, url_signer)}",
            "web": url,
        },
    }


def _stream_query(prediction: Prediction, url_signer: UrlSigner) -> str:
    """Lets browsers and Replicate's Node client use the link without a key.

    The query is the same every time, because identical requests must get identical responses.
    """
    expires_s = int(prediction.deadline_s) + STREAM_LINK_S
    signed = url_signer.query(stream_key(prediction.record), EVENTS_TYPE, expires_s)
    return f"record={prediction.record}&{signed}"


def output_of(
    prediction: Prediction, record: Record, url_signer: UrlSigner
) -> list[Any] | Any | None:
    """Returns vectors as lists of floats, and images as signed URLs or, if small, `data:` URLs.

    A custom class that did not succeed may have yielded part of its output.
    """
    if record.reply is None:
        return None
    if record.state != "succeeded":
        chunks = [
            outcome.partial for outcome in record.reply.outcomes if outcome.partial is not None
        ]
        return partial_output_of(prediction, chunks, url_signer) or None
    output = record.reply.output
    if isinstance(output, ImagesResult):  # each one has its own link
        return [
            _show_output(prediction, index, image, url_signer)
            for index, image in enumerate(output.images)
            if image is not None
        ]
    if output is not None:
        return _show_output(prediction, 0, output, url_signer)
    results = [outcome.result for outcome in record.reply.outcomes]
    outputs = [
        _show_output(prediction, index, result, url_signer)
        for index, result in enumerate(results)
        if result is not None
    ]
    return outputs if prediction.is_list else outputs[0] if outputs else None


async def read_partial(
    prediction: Prediction, record: Record, tokens: TokenStreams, url_signer: UrlSigner
) -> list[Any] | None:
    """Reads the output that a custom class has yielded so far.

    The output counts as delivered, so it is charged even if the prediction is canceled later.
    Returns None if nothing has been yielded, the record already has the output, or Redis does not
    respond.
    """
    is_ended_by_worker = record.reply is not None and record.reply.outcomes
    if not prediction.streams or record.state == "starting" or is_ended_by_worker:
        return None
    with suppress(Unavailable):
        (read,) = await tokens.read([(prediction.record, 0, 0)])
        return partial_output_of(prediction, read.chunks, url_signer) or None
    return None


def partial_output_of(
    prediction: Prediction, chunks: Sequence[Chunk], url_signer: UrlSigner
) -> list[Any]:
    """Returns the first elements of an output, in their final form."""

    def link_to(file: StreamedFile) -> str:
        key = build_streamed_key(prediction.record, 0, file)
        return prediction.base_url + url_signer.path(key, file.media_type)

    pieces = list[Any]()
    for chunk in chunks:
        if prediction.streams == "items":
            pieces += [element.to_json_value(link_to) for element in read_elements(chunk.text)]
        elif isinstance(chunk, PieceChunk):
            pieces += chunk.pieces
        else:  # written by release 0.1.0, so the piece boundaries are unknown
            break
    return pieces


def partial_objects_of(prediction: Prediction, record: Record) -> list[str]:
    """Returns the keys of large files in the output of a class that did not succeed."""
    if prediction.streams != "items" or record.reply is None:
        return []
    return [
        build_streamed_key(prediction.record, 0, file)
        for outcome in record.reply.outcomes
        if outcome.partial is not None
        for element in read_elements(outcome.partial.text)
        for file in element.files
        if not file.uri
    ]


def _show_output(prediction: Prediction, index: int, result: Result, url_signer: UrlSigner) -> Any:
    media_type = MEDIA_TYPES[prediction.output_format]

    def link_to(key: str | None, media_type: str = media_type) -> str:
        return prediction.base_url + url_signer.path(
            key or inline_key(prediction.record, index), media_type
        )

    return result.to_output(media_type, link_to)


def step_output_of(
    prediction: Prediction, outcome: ItemOutcome, url_signer: UrlSigner
) -> dict[str, Any]:
    """Returns a flow step item's outcome, as shown in its stream."""
    step = prediction.steps[step_of(outcome.index)]
    fields: dict[str, Any] = {"step": step["id"]}
    if step.get("for_each") is not None:
        fields["item"] = outcome.index % MAX_STEP_ITEMS
    if outcome.result is None:
        return fields | {"error": reason_of(outcome)}
    result = CustomResult(*with_places(outcome.result.step_value()))
    return fields | {"output": _show_output(prediction, 0, result, url_signer)}


def error_of(record: Record) -> str | None:
    """Returns the reason the prediction failed, as text, or None."""
    if record.state != "failed":
        return None
    if record.reply is None:
        return "failed"
    if record.reply.error is not None:
        return record.reply.error.message
    return next(
        (reason_of(outcome) for outcome in record.reply.outcomes if outcome.error is not None),
        "failed",
    )


def read_printed_logs(record: Record) -> PrintedLogs:
    """Returns the text that the model has printed so far."""
    for outcome in record.reply.outcomes if record.reply is not None else ():
        if outcome.logs is not None:  # a class processes only one item per prediction
            return outcome.logs
    return PrintedLogs(record.logs, record.logs_left_out)


def logs_of(record: Record) -> str:
    """Returns the text the model printed, or else its progress in tqdm's format.

    Replicate's clients parse the latter. Empty if there is neither.
    """
    printed = read_printed_logs(record)
    if printed.end or not record.steps:
        return printed.after(0)
    step = record.steps if record.state == "succeeded" else min(record.step, record.steps)
    share = step / record.steps
    bar = ("█" * int(share * BAR_WIDTH)).ljust(BAR_WIDTH)
    return f"{int(share * 100):3d}%|{bar}| {step}/{record.steps}\n"


def metrics_of(prediction: Prediction, record: Record) -> dict[str, Any]:
    """Returns metrics under Replicate's names (seconds) and RunPod's (milliseconds), and the cost.

    Includes metrics recorded by the model itself.
    """
    times: dict[str, Any] = {}
    if record.started_at_s:
        times["delayTime"] = max(0, round((record.started_at_s - record.created_at_s) * 1000))
    if not record.is_over:
        return times
    times["total_time"] = round(read_ended_at_s(record) - record.created_at_s, 6)
    receipts = [outcome.receipt for outcome in record.reply.outcomes] if record.reply else []
    times_ms = [receipt.inference_ms for receipt in receipts if receipt.inference_ms is not None]
    if times_ms:
        times["predict_time"] = round(max(times_ms) / 1000, 6)
        times["executionTime"] = round(max(times_ms))
    times |= _count_tokens(receipts)
    if record.reply and prediction.price is not None:
        priced = [
            (prediction.price_of(outcome) or prediction.price, outcome)
            for outcome in record.reply.outcomes
        ]
        times["device_time"] = round(
            sum(device_s(price, outcome.receipt) for price, outcome in priced), 6
        )
        times["cost_usd"] = sum(cost_usd(price, outcome) for price, outcome in priced)
        if prediction.steps:
            times["steps"] = _steps_of(prediction, record.reply.outcomes)
    if record.state == "succeeded" and record.reply:
        for outcome in record.reply.outcomes:
            recorded = outcome.result.recorded_metrics if outcome.result is not None else {}
            times = {**recorded, **times}
        left_out = _count_truncated(
            record.reply.outcomes, is_asked=bool(prediction.input.get("truncate"))
        )
        if left_out is not None:
            times["truncated_tokens"] = left_out
        times |= _metrics_of_images(record.reply.output)
    return times


def _count_tokens(receipts: Sequence[Receipt]) -> dict[str, int]:
    """Returns the tokens read and generated by a text model, under Replicate's names."""
    token_receipts = [receipt for receipt in receipts if receipt.output_tokens is not None]
    if not token_receipts:
        return {}
    output = sum(receipt.output_tokens or 0 for receipt in token_receipts)
    total = sum(receipt.tokens or 0 for receipt in token_receipts)
    return {"input_token_count": total - output, "output_token_count": output}


def _metrics_of_images(output: Result | None) -> dict[str, Any]:
    """Returns image metrics for a request that runs additional steps after each image."""
    if not isinstance(output, ImagesResult):
        return {}
    truncated_tokens = ImageResult.count_truncated(output.delivered)
    metrics = {} if truncated_tokens is None else {"truncated_tokens": truncated_tokens}
    return metrics | ({"withheld": output.withheld} if output.withheld else {})


def _steps_of(prediction: Prediction, outcomes: Sequence[ItemOutcome]) -> list[dict[str, Any]]:
    """Returns the progress and cost of each flow step."""
    steps: list[dict[str, Any]] = [
        {"id": step["id"], "model": step["model"], "items": 0, "failed": 0, "cost_usd": 0.0}
        for step in prediction.steps
    ]
    for outcome, step in ((outcome, steps[step_of(outcome.index)]) for outcome in outcomes):
        step["items"] += 1
        step["failed"] += outcome.status != "succeeded"
        if (price := prediction.price_of(outcome)) is not None:
            step["cost_usd"] += cost_usd(price, outcome)
    return steps


def _count_truncated(outcomes: Sequence[ItemOutcome], *, is_asked: bool) -> int | None:
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    return type(results[0]).count_truncated(results, is_asked=is_asked) if results else None


def read_ended_at_s(record: Record) -> float:
    """Returns when a prediction finished.

    For a canceled prediction, that is when it was canceled, no matter what its worker reports.
    """
    return record.canceled_at_s or record.ended_at_s


def iso(at_s: float) -> str:
    """Returns a Unix time in ISO 8601 format, in UTC."""
    return (
        datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
