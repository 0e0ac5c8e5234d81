"""Reasons a definition is invalid or a message does not match, and limits on validation."""

MAX_DEPTH = 100
"""Maximum nesting depth of a message's values. Schemas may be recursive."""
MAX_VALUES = 5_000_000
"""Maximum number of values checked for one request's messages, across all revisions. This takes
seconds.

A few bytes of a message can encode any number of zero-byte values.
"""
_LONGEST_TEXT = 500
_LONGEST_END = 120
"""Characters kept at each end of a long location, to leave room for the reason."""


class Malformed(Exception):
    """A definition is invalid. Contains the reason."""


class Mismatch(Exception):
    """A message does not match a schema."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._reason = reason
        self._place: list[str] = []

    def within(self, part: str) -> None:
        """Prepend a component to the location. Components are added from the inside out."""
        self._place.append(part)

    def __str__(self) -> str:
        """The location and the reason, shortened if the schema has long names."""
        place = "".join(reversed(self._place)).removeprefix(".")
        if len(place) > 2 * _LONGEST_END:
            place = f"{place[:_LONGEST_END]}...{place[-_LONGEST_END:]}"
        return (f"{place}: {self._reason}" if place else self._reason)[:_LONGEST_TEXT]


class Budget:
    """The number of values that may still be checked for one request."""

    def __init__(self, values: int = MAX_VALUES) -> None:
        self._values = values

    def enter(self, depth: int, values: int = 1) -> None:
        """Count a value.

        Args:
            depth: number of values in which this value is nested.
            values: cost of checking the value, expressed as a number of values.

        Raises:
            Mismatch: the value is nested too deeply, or there are too many values.
        """
        if depth > MAX_DEPTH:
            raise Mismatch(f"it is nested more than {MAX_DEPTH} levels deep")
        self._values -= values
        if self._values < 0:
            raise Mismatch("the messages contain more values than the embedded server checks")
