"""A batch's documents, each written once, and the resulting state.

    created      → validating
    plan         → in_progress
    cancel       → cancelling        (a marker next to the open batch's marker)
    finalizing   → finalizing        with the end that it leads to
    ended        → completed, failed, expired, cancelled

Each step is one document, and the first writer wins. As a result, a late runner can't undo another
runner's work.

A segment consists of a line with the counts so far, followed by the responses and the errors. A
segment is one object, so it is stored completely or not at all. Its counts include all earlier
segments, so the last segment shows the batch's progress.

Lines of several segments run at the same time, but segments are written in order. Until then, the
responses are in logs (api/batch_runner/answers.py), which the next runner reads. When a release
0.1.0 runner sets a segment aside, it stores the responses as a half segment. Such a runner ignores
logs, so it runs those lines again.
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
    """Base URL the caller used to reach the API. File URLs begin with it."""
    key_id: str = ""
    price_share: float = 1.0
    """Fraction of the list price charged for the batch's lines, from the tenant's plan."""
    weight: float = 1.0
    models: list[str] | None = None
    """Models the key may use. None means all models."""
    plan: Plan = DEFAULT_PLAN
    plan_name: str = ""
    key_limits: Limits | None = None

    def caller(self, plan: Plan, plan_name: str, key_limits: Limits | None) -> Caller:
        """Returns the caller to charge.

        Lines count toward the monthly budgets. Rate limits apply only to requests.

        Args:
            plan_name: plan name. Empty if the tenant has no plan.
            key_limits: limits that apply to the key itself.
        """
        return Caller(
            tenant=self.tenant,
            key_id=self.key_id,
            plan=msgspec.structs.replace(plan, per_model={}, **_NO_RATES),
            plan_name=plan_name,
            key_limits=key_limits and msgspec.structs.replace(key_limits, **_NO_RATES),
        )


class LineBlock(msgspec.Struct, array_like=True):
    """A block of lines that are written together. Its boundaries never change."""

    offset: int
    """Offset of the first line in the file, in bytes."""
    size_bytes: int
    first_line: int
    """Line number of the block's first line within the file."""


class BatchPlan(msgspec.Struct, kw_only=True):
    """The result of validating a file."""

    model: str
    total: int
    segments: list[LineBlock]
    in_progress_at_s: float


class LineUsage(NamedTuple):
    """Usage reported in a line's response. Amounts a model does not report are 0."""

    input_tokens: int = 0
    """Tokens read, including cached tokens."""
    output_tokens: int = 0
    cached_tokens: int = 0
    audio_seconds: int = 0
    pages: int = 0


class Counts(msgspec.Struct, omit_defaults=True):
    """Counts of finished lines and the resources they used."""

    completed: int = 0
    failed: int = 0
    not_run: int = 0
    """Failed lines that were not run."""
    tokens: int = 0
    """Tokens read and generated."""
    output_tokens: int = 0
    """Tokens generated, which are also included in `tokens`. Like the fields below, 0 for lines
    finished by a release 0.1.0 runner.
    """
    cached_tokens: int = 0
    audio_seconds: int = 0
    pages: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed


class LineError(msgspec.Struct):
    """The reason a file was rejected, in OpenAI's format."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Finalizing(msgspec.Struct):
    """A batch's final status, decided once all lines are finished."""

    end: End
    at_s: float


class BatchEnded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A finished batch's complete state, in one object."""

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
    """Everything that is known about a batch."""

    created: BatchCreated
    plan: BatchPlan | None = None
    cancelling_at_s: float = 0.0
    finalizing: Finalizing | None = None
    counts: Counts | None = None
    ended: BatchEnded | None = None

    @property
    def model(self) -> str:
        """The model that all lines use. Empty until the file has been read."""
        if self.ended is not None:
            return self.ended.plan_model
        return "" if self.plan is None else self.plan.model

    @property
    def status(self) -> Status:
        """The status, under the name OpenAI's API uses."""
        if self.ended is not None:
            return self.ended.end
        if self.cancelling_at_s:
            return "cancelling"
        if self.finalizing is not None:
            return "finalizing"
        return "validating" if self.plan is None else "in_progress"


class LineAnswer(NamedTuple):
    """A line's final result: a line in the output file or the error file."""

    data: bytes
    end: Literal["completed", "failed", "not_run"]
    tokens: int = 0
    """Kept for release 0.1.0, which does not know about the other amounts."""
    usage: LineUsage = LineUsage()


class SegmentHeader(msgspec.Struct):
    """The first line of a segment. `counts` covers all lines up to the end of the segment."""

    counts: Counts
    output_bytes: int
    error_bytes: int


class AnswersHeader(msgspec.Struct):
    """The first line of an answer log. `counts` covers all finished lines.

    `segment` is set only in a release 0.1.0 half segment.
    """

    counts: Counts
    segment: int = -1


_decoder = msgspec.json.Decoder(SegmentHeader)
_answers_header_decoder = msgspec.json.Decoder(AnswersHeader)
_answers_decoder = msgspec.msgpack.Decoder(dict[int, LineAnswer])


def counts_after(before: Counts, answers: Sequence[LineAnswer]) -> Counts:
    """Returns the counts after adding `answers`."""
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
    """Returns a segment's bytes. `counts` covers all lines up to the segment's end."""
    outputs = [answer.data for answer in answers if answer.end == "completed"]
    errors = [answer.data for answer in answers if answer.end != "completed"]
    output, error = (b"".join(line + b"\n" for line in lines) for lines in (outputs, errors))
    return _pad(SegmentHeader(counts, len(output), len(error))) + output + error


def encode_answers(counts: Counts, answers: Mapping[int, LineAnswer]) -> bytes:
    """Returns the bytes of a log with these answers, keyed by line number."""
    return _pad(AnswersHeader(counts)) + msgspec.msgpack.encode(answers)


def decode_header(data: bytes) -> SegmentHeader:
    """Reads the first HEADER_BYTES of a segment."""
    return _decoder.decode(data)


def decode_answers_header(data: bytes) -> AnswersHeader:
    """Reads the first HEADER_BYTES of an answer log."""
    return _answers_header_decoder.decode(data[:HEADER_BYTES])


def decode_answers(data: bytes) -> dict[int, LineAnswer]:
    """Reads an answer log. Returns the log's answers, keyed by line number."""
    return _answers_decoder.decode(data[HEADER_BYTES:])


def _pad(header: msgspec.Struct) -> bytes:
    return msgspec.json.encode(header).ljust(HEADER_BYTES - 1) + b"\n"
