"""What readers got of texts that end without a result, for their charge."""

from __future__ import annotations

import msgspec

from shared.messages import Item, ItemOutcome, ReplyBody
from shared.stores.token_streams import Delivered, TokenStreams
from shared.tasks.text import GenerationInput
from shared.usage.charge import ENDED_BY_CALLER
from workers.job import PulledJob


def is_streamed(item: Item) -> bool:
    """Whether the tokens of an item go to a stream."""
    return isinstance(item.input, GenerationInput) and item.input.is_streamed


async def with_delivered(streams: TokenStreams, pulled: PulledJob, body: ReplyBody) -> ReplyBody:
    """Ends the delivery of a job's canceled and late texts. Their receipts count what was read.

    Args:
        streams: have the tokens.
        pulled: the job, a prediction.
        body: its answer.

    Raises:
        Unavailable: Redis did not answer.
    """
    streamed = {item.index for item in pulled.items if is_streamed(item)}
    ended = [
        outcome.index
        for outcome in body.outcomes
        if outcome.index in streamed and outcome.status in ENDED_BY_CALLER
    ]
    if not ended:
        return body
    found = dict(zip(ended, await streams.end_delivery(pulled.record, ended), strict=True))
    return msgspec.structs.replace(
        body, outcomes=[_counted(one, found.get(one.index)) for one in body.outcomes]
    )


def _counted(outcome: ItemOutcome, delivered: Delivered | None) -> ItemOutcome:
    if delivered is None:
        return outcome
    receipt = msgspec.structs.replace(
        outcome.receipt,
        tokens=delivered.input_tokens + delivered.output_tokens,
        output_tokens=delivered.output_tokens,
        cached_tokens=delivered.cached_tokens,
        is_delivered_in_part=True,
    )
    return msgspec.structs.replace(outcome, receipt=receipt)
