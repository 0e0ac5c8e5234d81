"""What consumers say of the messages they have: acked, nacked, or needed for longer."""

from collections.abc import Iterable

from pubsub_emulator.errors import INVALID_ACK_ID, InvalidArgument
from pubsub_emulator.protos import Message
from pubsub_emulator.state.backlog import Backlog

_MAX_REQUEST_BYTES = 512 * 1024
"""Source: https://cloud.google.com/pubsub/quotas. A refusal that names every id of a request, with
their reasons, is below the 4 MiB that Google's clients take.
"""


def check_ack_request_size(request: Message) -> None:
    """Refuse a request with more ack ids than the service takes.

    Raises:
        InvalidArgument: it is too large. Nothing was acked.
    """
    if request.ByteSize() > _MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"Request payload size exceeds the limit: {_MAX_REQUEST_BYTES} bytes."
        )


def acknowledge(backlog: Backlog, ack_ids: Iterable[str]) -> dict[str, str]:
    """Settle the messages of these ack ids.

    Returns:
        The refused ack ids with their reasons. Without exactly-once delivery there are none: an
        expired id acks the message if it is still there, and is ignored otherwise.

    Raises:
        InvalidArgument: an ack id that no server would have made. Nothing was acked.
    """
    refused: dict[str, str] = {}
    exactly_once = backlog.settings.exactly_once
    for ack_id, (delivery, is_current) in [(each, backlog.find(each)) for each in ack_ids]:
        if exactly_once and not is_current:
            refused[ack_id] = INVALID_ACK_ID
        elif delivery is not None:
            backlog.settle(delivery)
    return refused


def modify_ack_deadline(
    backlog: Backlog, ack_ids: Iterable[str], deadlines_s: Iterable[int]
) -> dict[str, str]:
    """Move the end of leases to so many seconds from now. 0 is a nack.

    Returns:
        The refused ack ids with their reasons. None without exactly-once delivery.

    Raises:
        InvalidArgument: an ack id that no server would have made. Nothing was changed.
    """
    refused: dict[str, str] = {}
    found = [(ack_id, *backlog.find(ack_id)) for ack_id in ack_ids]
    for (ack_id, delivery, is_current), deadline_s in zip(found, deadlines_s, strict=True):
        if delivery is None or not is_current:
            if backlog.settings.exactly_once:
                refused[ack_id] = INVALID_ACK_ID
        elif deadline_s == 0:
            backlog.give_back(delivery)
        else:
            backlog.extend(delivery, deadline_s)
    return refused
