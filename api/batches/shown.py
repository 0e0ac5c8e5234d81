"""A batch as callers see it, in the shape of OpenAI's API."""

from __future__ import annotations

import msgspec

from api.batches.documents import BatchEnded, BatchState, Counts
from api.schemas.openai_batches import (
    BatchErrorItem,
    BatchErrors,
    BatchObject,
    BatchRequestCounts,
    BatchUsage,
)


def shown_batch(state: BatchState) -> BatchObject:
    """The body of a batch."""
    created, plan, counts = state.created, state.plan, state.counts or Counts()
    shown = BatchObject(
        id=created.id,
        endpoint=created.endpoint,
        input_file_id=created.input_file_id,
        status=state.status,
        created_at=int(created.created_at_s),
        expires_at=int(created.expires_at_s),
        metadata=created.metadata,
        request_counts=BatchRequestCounts(0, counts.completed, counts.failed),
        usage=BatchUsage(counts.tokens, counts.tokens) if counts.tokens else None,
        cancelling_at=_second(state.cancelling_at_s),
    )
    if state.ended is not None:
        return _with_end(shown, state.ended)
    if plan is not None:
        shown.request_counts.total = plan.total
        shown.model, shown.in_progress_at = plan.model, _second(plan.in_progress_at_s)
    if state.finalizing is not None:
        shown.finalizing_at = _second(state.finalizing.at_s)
    return shown


def _with_end(shown: BatchObject, ended: BatchEnded) -> BatchObject:
    shown.request_counts.total = ended.total
    errors = [BatchErrorItem(one.code, one.message, one.line, one.param) for one in ended.errors]
    return msgspec.structs.replace(
        shown,
        model=ended.plan_model or None,
        errors=BatchErrors(errors) if errors else None,
        output_file_id=ended.output_file_id or None,
        error_file_id=ended.error_file_id or None,
        in_progress_at=_second(ended.in_progress_at_s),
        finalizing_at=_second(ended.finalizing_at_s),
        cancelling_at=_second(ended.cancelling_at_s),
        **{f"{ended.end}_at": _second(ended.at_s)},
    )


def _second(at_s: float) -> int | None:
    return int(at_s) if at_s else None
