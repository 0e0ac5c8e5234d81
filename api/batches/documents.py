"""The documents of a batch, each written once, and the state that follows from them.

    created      → validating
    plan         → in_progress
    cancel       → cancelling        (a marker next to that of the open batch)
    finalizing   → finalizing        with the end that it leads to
    ended        → completed, failed, expired, cancelled

Each step is one document, and the first writer of a document wins. So a runner that is late can't
undo the work of another one.

A segment has a line with the counts so far, then the answers, then the errors. It is one object, so
it is stored completely or not at all. Its counts include those of all earlier segments, so the last
one has the progress of its batch.

Lines of several segments run at the same time, and segments are written in order. Until then their
answers are in logs (api/batch_runner/answers.py), which the next runner reads. A runner of release
0.1.0 stored the answers of a segment that it set aside as a half segment, and ignores logs: it
computes their lines again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from shared.tenants.plan import DEFAULT_PLAN, Caller, Limits, Plan

WINDOW_S = 24 * 3600
"""The completion window `24h`."""

End = Literal["completed", "failed", "expired", "cancelled"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


_NO_RATES = {
    "requests_per_min": None,
    "tokens_per_min": None,
    "pixel_steps_per_min": None,
    "work_per_min": None,
    "max_in_flight": None,
}

HEADER_BYTES = 256


class BatchCreated(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The caller's request and its terms. Times are Unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at_s: float
    expires_at_s: float
    metadata: dict[str, str] | None = None
    output_keep_s: int
    webhook: str = ""
    base_url: str = ""
    """The URL that the caller reached the API by, which those of its files begin with."""
    key_id: str = ""
    price_share: float = 1.0
    """The part of the list price that its lines cost, by the plan of its tenant."""
    weight: float = 1.0
    models: list[str] | None = None
    """The models that its key may use. None: all."""
    plan: Plan = DEFAULT_PLAN
    plan_name: str = ""
    key_limits: Limits | None = None

    def caller(self, plan: Plan, plan_name: str, key_limits: Limits | None) -> Caller:
        """Returns the caller that pays.

        Lines count toward the monthly budgets. Rate limits apply only to requests.

        Args:
            plan_name: its name. Empty: the tenant has none.
            key_limits: of the key alone.
        """
        return Caller(
            tenant=self.tenant,
            key_id=self.key_id,
            plan=msgspec.structs.replace(plan, per_model={}, **_NO_RATES),
            plan_name=plan_name,
            key_limits=key_limits and msgspec.structs.replace(key_limits, **_NO_RATES),
        )


class LineBlock(msgspec.Struct, array_like=True):
    """Lines that are written together. Which lines they are never changes."""

    offset: int
    """Offset of the first line in the file, in bytes."""
    size_bytes: int
    first_line: int
    """The number of the first line in the file."""


class BatchPlan(msgspec.Struct, kw_only=True):
    """The result of the validation."""

    model: str
    total: int
    segments: list[LineBlock]
    in_progress_at_s: float


class LineUsage(NamedTuple):
    """The usage that the answer to a line reports. All are 0 where a model has none."""

    input_tokens: int = 0
    """Tokens that were read, cached ones included."""
    output_tokens: int = 0
    cached_tokens: int = 0
    audio_seconds: int = 0
    pages: int = 0


class Counts(msgspec.Struct, omit_defaults=True):
    """Counts of the lines that have ended, and the resources they used."""

    completed: int = 0
    failed: int = 0
    not_run: int = 0
    """The failed lines that were not run."""
    tokens: int = 0
    """Tokens that were read and written."""
    output_tokens: int = 0
    """The part of `tokens` that was written. 0 for lines that a runner of release 0.1.0 ended, as
    are the further amounts."""
    cached_tokens: int = 0
    audio_seconds: int = 0
    pages: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed


class LineError(msgspec.Struct):
    """Why a file was refused, in the shape of OpenAI's API."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Finalizing(msgspec.Struct):
    """The end of a batch, decided once all lines have ended."""

    end: End
    at_s: float


class BatchEnded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The complete state of a batch after its end, in one object."""

    created: BatchCreated
    end: End
    at_s: float
    plan_model: str = ""
    total: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    in_progress_at_s: float = 0.0
    cancelling_at_s: float = 0.0
    finalizing_at_s: float = 0.0
    output_file_id: str = ""
    error_file_id: str = ""
    errors: list[LineError] = []


@dataclass(frozen=True, slots=True)
class BatchState:
    """All that is known of a batch."""

    created: BatchCreated
    plan: BatchPlan | None = None
    cancelling_at_s: float = 0.0
    finalizing: Finalizing | None = None
    counts: Counts | None = None
    ended: BatchEnded | None = None

    @property
    def model(self) -> str:
        """The model of all its lines. Empty until the file was read."""
        if self.ended is not None:
            return self.ended.plan_model
        return "" if self.plan is None else self.plan.model

    @property
    def status(self) -> Status:
        """In the words of OpenAI's API."""
        if self.ended is not None:
            return self.ended.end
        if self.cancelling_at_s:
            return "cancelling"
        if self.finalizing is not None:
            return "finalizing"
        return "validating" if self.plan is None else "in_progress"


class LineAnswer(NamedTuple):
    """The end of a line: a line of the output file, or of the error file."""

    data: bytes
    end: Literal["completed", "failed", "not_run"]
    tokens: int = 0
    """As release 0.1.0 knows it, without the other amounts."""
    usage: LineUsage = LineUsage()


class SegmentHeader(msgspec.Struct):
    """The first line of a segment. `counts` are those of all lines up to its end."""

    counts: Counts
    output_bytes: int
    error_bytes: int


class AnswersHeader(msgspec.Struct):
    """The first line of a log of answers. `counts` are those of all lines that have ended.

    `segment` is only set in a half segment of release 0.1.0.
    """

    counts: Counts
    segment: int = -1


_decoder = msgspec.json.Decoder(SegmentHeader)
_answers_header_decoder = msgspec.json.Decoder(AnswersHeader)
_answers_decoder = msgspec.msgpack.Decoder(dict[int, LineAnswer])


def counts_after(before: Counts, answers: Sequence[LineAnswer]) -> Counts:
    """Returns the counts with `answers` added."""
    completed = sum(answer.end == "completed" for answer in answers)
    return Counts(
        before.completed + completed,
        before.failed + len(answers) - completed,
        before.not_run + sum(answer.end == "not_run" for answer in answers),
        before.tokens + sum(answer.tokens for answer in answers),
        before.output_tokens + sum(answer.usage.output_tokens for answer in answers),
        before.cached_tokens + sum(answer.usage.cached_tokens for answer in answers),
        before.audio_seconds + sum(answer.usage.audio_seconds for answer in answers),
        before.pages + sum(answer.usage.pages for answer in answers),
    )


def encode_segment(counts: Counts, answers: Sequence[LineAnswer]) -> bytes:
    """Returns the bytes of a segment. `counts` are those of all lines up to its end."""
    outputs = [answer.data for answer in answers if answer.end == "completed"]
    errors = [answer.data for answer in answers if answer.end != "completed"]
    output, error = (b"".join(one + b"\n" for one in lines) for lines in (outputs, errors))
    return _padded(SegmentHeader(counts, len(output), len(error))) + output + error


def encode_answers(counts: Counts, answers: Mapping[int, LineAnswer]) -> bytes:
    """Returns the bytes of a log of answers, by line number."""
    return _padded(AnswersHeader(counts)) + msgspec.msgpack.encode(answers)


def decode_header(data: bytes) -> SegmentHeader:
    """Reads the first HEADER_BYTES of a segment."""
    return _decoder.decode(data)


def decode_answers_header(data: bytes) -> AnswersHeader:
    """Reads the first HEADER_BYTES of a log of answers."""
    return _answers_header_decoder.decode(data[:HEADER_BYTES])


def decode_answers(data: bytes) -> dict[int, LineAnswer]:
    """Reads the answers in a log, by line number."""
    return _answers_decoder.decode(data[HEADER_BYTES:])


def _padded(header: msgspec.Struct) -> bytes:
    return msgspec.json.encode(header).ljust(HEADER_BYTES - 1) + b"\n"
