"""All errors that Penstock raises deliberately, and their codes.

PenstockError
├── BadInput                 the caller's request is wrong, with the field
│   ├── UnknownModel
│   ├── InputTooLarge
│   │   └── ContextLengthExceeded
│   └── ModerationBlocked    the output is withheld: the catalog's safety check flagged it
├── Overloaded               at capacity, with the seconds to wait
├── DeadlineExceeded         the response came, or would come, too late
├── Canceled                 no caller is waiting for the response anymore
├── ModelFailed              the model could not process this item
│   └── SchemaNotMatched     its output does not match the caller's JSON schema
├── ModelWithdrawn           an operator has stopped this revision of the model
├── Unavailable              a required service (broker, store) is unreachable
├── UndecodableMessage       a message on a topic is not a job or reply
└── ConfigurationError       a catalog or a setting is wrong, with the line or variable

A `code` is stable. It appears in messages, rows, and metrics. api/errors.py maps it to an HTTP
status.

`message` is for us: logs and commands. It may quote messages from BigQuery, Redis, the broker, or
the object store, including our addresses and names. `public_message` is for callers. Everything
sent to a caller (a body, an event, a record, a webhook) uses it.
"""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised by msgspec for data it can't decode. Invalid UTF-8 and deep nesting raise Python's own
errors.
"""
MAX_MESSAGE_CHARS = 8000
"""In characters. Messages quote callers' input, and appear in responses, replies, records and logs.
"""


class PenstockError(Exception):
    """Something went wrong inside Penstock.

    Args:
        message: what happened, for us. Defaults to the public message, or to the docstring's first
            line.
        field: the invalid request field or variable.
        public: message for the caller. For the default, see `public_by_default`.
    """

    code = "internal"
    public_by_default: str | None = "internal error; try again"
    """Public message if none is passed. None means the message itself, which is about what the
    caller sent.
    """

    def __init__(
        self, message: str | None = None, *, field: str | None = None, public: str | None = None
    ) -> None:
        words = message or public or (type(self).__doc__ or "").split("\n", 1)[0]
        self.message = words[:MAX_MESSAGE_CHARS]
        self.field = field
        self._public = public
        super().__init__(self.message)

    @property
    def public_message(self) -> str:
        """The error message that callers may read."""
        return self._public or self.public_by_default or self.message


class BadInput(PenstockError):
    """The request is not valid."""

    code = "invalid_input"
    public_by_default = None


class UnknownModel(BadInput):
    """No model with this name is served here."""

    code = "model_not_found"


class InputTooLarge(BadInput):
    """The request is larger than this model accepts."""

    code = "input_too_large"


class ContextLengthExceeded(InputTooLarge):
    """The text has more tokens than this model accepts."""

    code = "context_length_exceeded"


class ModerationBlocked(BadInput):
    """The model's output was withheld because the catalog's safety check flagged it."""

    code = "moderation_blocked"


class Overloaded(PenstockError):
    """The system is at capacity. Try again later."""

    code = "overloaded"
    public_by_default = None

    def __init__(
        self, message: str | None = None, *, retry_after_s: float = 1.0, public: str | None = None
    ) -> None:
        super().__init__(message, public=public)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PenstockError):
    """The deadline passed before the response was ready."""

    code = "deadline_exceeded"
    public_by_default = None


class Canceled(PenstockError):
    """The caller canceled the request or hung up."""

    code = "canceled"
    public_by_default = None


class ModelFailed(PenstockError):
    """The model could not process this item."""

    code = "model_failed"
    public_by_default = None


class SchemaNotMatched(ModelFailed):
    """The model's output does not match the request's JSON schema."""

    code = "schema_not_matched"


class ModelWithdrawn(PenstockError):
    """The operator has withdrawn this revision of the model."""

    code = "model_withdrawn"
    public_by_default = None


class Unavailable(PenstockError):
    """A service required by this request is unreachable."""

    code = "unavailable"
    public_by_default = "a service required by this request is unreachable; try again"


class UndecodableMessage(PenstockError):
    """A message could not be decoded as the type that its topic carries."""

    code = "undecodable_message"


class ConfigurationError(PenstockError):
    """The catalog or a setting is invalid."""

    code = "configuration"


_ON_THE_WIRE = (
    BadInput,
    UnknownModel,
    InputTooLarge,
    ContextLengthExceeded,
    ModerationBlocked,
    DeadlineExceeded,
    Canceled,
    ModelFailed,
    SchemaNotMatched,
    ModelWithdrawn,
    Unavailable,
    UndecodableMessage,
)


def error_for_code(code: str, message: str, field: str | None = None) -> PenstockError:
    """Returns the error for a code and message received from elsewhere.

    An unknown code returns a plain PenstockError.

    Args:
        message: the message as sent, which is always the public message.
    """
    for kind in _ON_THE_WIRE:
        if kind.code == code:
            return kind(message, field=field, public=message)
    if code == Overloaded.code:
        return Overloaded(message, public=message)
    return PenstockError(message, field=field, public=message)
