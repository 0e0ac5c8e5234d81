"""Consumers' calls regarding their messages: acks, nacks, and lease extensions."""

from collections.abc import Iterable

from pubsub_emulator.errors import INVALID_ACK_ID, InvalidArgument
from pubsub_emulator.protos import Message
from pubsub_emulator.state.backlog import Backlog

_MAX_REQUEST_BYTES = 512 * 1024
"""Source: https://cloud.google.com/pubsub/quotas.

Even an error that lists every id in a request, with reasons, is smaller than the 4 MiB that
Google's clients accept.
"""


def check_ack_request_size(request: Message) -> None:
    """Reject a request with more ack ids than the service allows.

    Raises:
        InvalidArgument: the request is too large. Nothing was acked.
    """
    if request.ByteSize() > _MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"Request payload size exceeds the limit: {_MAX_REQUEST_BYTES} bytes."
        )


def acknowledge(backlog: Backlog, ack_ids: Iterable[str]) -> dict[str, str]:
    """Ack the messages with these ack ids.

    Returns:
        Rejected ack ids with reasons. Empty without exactly-once delivery: an expired id then acks
            the message if it still exists and is otherwise ignored.

    Raises:
        InvalidArgument: an ack id has an invalid format. Nothing was acked.
    """
    refused: dict[str, str] = {}
    exactly_once = backlog.settings.exactly_once
    for ack_id, (delivery, is_current) in [(ack_id, backlog.find(ack_id)) for ack_id in ack_ids]:
        if exactly_once and not is_current:
            refused[ack_id] = INVALID_ACK_ID
        elif delivery is not None:
            backlog.settle(delivery)
    return refused


def modify_ack_deadline(
    backlog: Backlog, ack_ids: Iterable[str], deadlines_s: Iterable[int]
) -> dict[str, str]:
    """Set leases to end this many seconds from now; 0 is a nack.

    Returns:
        Rejected ack ids with reasons. Empty without exactly-once delivery.

    Raises:
        InvalidArgument: an ack id has an invalid format. Nothing was changed.
    """
    refused: dict[str, str] = {}
    deliveries = [(ack_id, *backlog.find(ack_id)) for ack_id in ack_ids]
    for (ack_id, delivery, is_current), deadline_s in zip(deliveries, deadlines_s, strict=True):
        if delivery is None or not is_current:
            if backlog.settings.exactly_once:
                refused[ack_id] = INVALID_ACK_ID
        elif deadline_s == 0:
            backlog.give_back(delivery)
        else:
            backlog.extend(delivery, deadline_s)
    return refused
