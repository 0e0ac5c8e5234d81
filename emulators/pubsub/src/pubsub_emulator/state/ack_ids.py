"""Ack ids: consumers get a new one each time a delivery is handed out."""

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.consumers import Delivery

NO_DELIVERY = -1, 0


class AckIds:
    """Creates and parses a subscription's ack ids.

    Args:
        holder: a number that is unique to this subscription, even across restarts.
    """

    def __init__(self, holder: int) -> None:
        self._prefix = f"{holder:x}"

    def of(self, delivery: Delivery) -> str:
        """Return the ack id for a delivery's current handout."""
        return f"{self._prefix}.{delivery.number}.{delivery.handouts}"

    def read(self, ack_id: str) -> tuple[int, int]:
        """Return the numbers of the delivery and the handout.

        The delivery's number is NO_DELIVERY if another holder created the id.

        Raises:
            InvalidArgument: the id has an invalid format.
        """
        try:
            prefix, number, handout = ack_id.split(".")
            delivery = int(number), int(handout)
        except ValueError:
            raise InvalidArgument(
                f"You have passed an invalid ack ID to the service (ack_id={ack_id})."
            ) from None
        return delivery if prefix == self._prefix else NO_DELIVERY
