"""The ids that consumers ack by: one for each hand-out of a delivery."""

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.consumers import Delivery

NO_DELIVERY = -1, 0


class AckIds:
    """Makes and reads the ack ids of one subscription.

    Args:
        holder: a number that no other subscription has, and none had before a restart.
    """

    def __init__(self, holder: int) -> None:
        self._prefix = f"{holder:x}"

    def of(self, delivery: Delivery) -> str:
        """The id that acks this hand-out of a delivery."""
        return f"{self._prefix}.{delivery.number}.{delivery.handouts}"

    def read(self, ack_id: str) -> tuple[int, int]:
        """The number of the delivery, and which of its hand-outs it was.

        NO_DELIVERY if another holder made the id.

        Raises:
            InvalidArgument: no server would have made it.
        """
        try:
            prefix, number, handout = ack_id.split(".")
            found = int(number), int(handout)
        except ValueError:
            raise InvalidArgument(
                f"You have passed an invalid ack ID to the service (ack_id={ack_id})."
            ) from None
        return found if prefix == self._prefix else NO_DELIVERY
