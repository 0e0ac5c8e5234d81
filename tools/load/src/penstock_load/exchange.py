"""A load generator's request and the response to it."""

from __future__ import annotations

import msgspec

LOST, UNANSWERED, UNCONNECTED, CANCELED = 0, -1, -2, -3
"""Statuses of requests without a response: the connection broke, time ran out, no connection could
be opened, or the caller disconnected. Only an unconnected request is certain never to have reached
the server.
"""


class Exchange(msgspec.Struct, omit_defaults=True):
    """A request and its response, with times measured from when the request was due.

    The other fields are filled in from the API's headers.
    """

    status: int
    round_trip_ms: float = 0.0
    request_id: str = ""
    cache: str = ""
    queue_ms: float = 0.0
    batch_ms: float = 0.0
    inference_ms: float = 0.0
    total_ms: float = 0.0
    ended_s: float = 0.0
    """Seconds since the start of the replay."""
    number: int = -1
    """The request's index in sending order."""
    lag_ms: float = 0.0
    """Time spent waiting for a connection."""
    cost_usd: float | None = None
    """Charge for the request. None if the response does not contain it."""

    @property
    def overhead_ms(self) -> float:
        """Returns how much time the pipeline added to the model's time."""
        return self.round_trip_ms - self.inference_ms
