"""All errors that Penstock raises on purpose, and their codes.

PenstockError
├── BadInput                 the caller's request is wrong, with the field
│   ├── UnknownModel
│   └── InputTooLarge
│       └── ContextLengthExceeded
├── Overloaded               full now, with the seconds to wait
├── DeadlineExceeded         the answer came, or would come, too late
├── Canceled                 no caller wants the answer any more
├── ModelFailed              the model could not compute this item
├── Unavailable              a required service (broker, store) is out of reach
├── UndecodableMessage       a message on a topic is not a job or reply
└── ConfigurationError       a catalog or a setting is wrong, with the line or variable

A `code` is stable. It appears in messages, rows and metrics. api/errors.py maps it to an HTTP
status.
"""

from __future__ import annotations

LONGEST_MESSAGE = 8000
"""Characters. Messages repeat input of callers, and appear in responses, replies, records and logs.
"""


class PenstockError(Exception):
    """Something went wrong inside Penstock."""

    code = "internal"

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        self.message = (message or (type(self).__doc__ or "").split("\n", 1)[0])[:LONGEST_MESSAGE]
        self.field = field
        super().__init__(self.message)


class BadInput(PenstockError):
    """The request is not valid."""

    code = "invalid_input"


class UnknownModel(BadInput):
    """No model of this name is served here."""

    code = "model_not_found"


class InputTooLarge(BadInput):
    """The request is larger than this model takes."""

    code = "input_too_large"


class ContextLengthExceeded(InputTooLarge):
    """The text has more tokens than the model takes."""

    code = "context_length_exceeded"


class Overloaded(PenstockError):
    """The system is full. Try again later."""

    code = "overloaded"

    def __init__(self, message: str | None = None, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PenstockError):
    """The deadline passed before the answer was there."""

    code = "deadline_exceeded"


class Canceled(PenstockError):
    """The caller canceled the request, or hung up."""

    code = "canceled"


class ModelFailed(PenstockError):
    """The model could not compute this item."""

    code = "model_failed"


class Unavailable(PenstockError):
    """A service that this request needs is out of reach."""

    code = "unavailable"


class UndecodableMessage(PenstockError):
    """A message could not be read as what its topic carries."""

    code = "undecodable_message"


class ConfigurationError(PenstockError):
    """The catalog or a setting is wrong."""

    code = "configuration"


_ON_THE_WIRE = (
    BadInput,
    UnknownModel,
    InputTooLarge,
    ContextLengthExceeded,
    DeadlineExceeded,
    Canceled,
    ModelFailed,
    Unavailable,
    UndecodableMessage,
)


def error_for_code(code: str, message: str, field: str | None = None) -> PenstockError:
    """Returns the error for a `code`. An unknown code gives a plain PenstockError."""
    for kind in _ON_THE_WIRE:
        if kind.code == code:
            return kind(message, field=field)
    if code == Overloaded.code:
        return Overloaded(message)
    return PenstockError(message, field=field)
