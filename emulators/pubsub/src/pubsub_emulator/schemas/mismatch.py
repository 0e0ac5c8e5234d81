"""Why a definition is none, where a message does not fit, and how much of it is looked at."""

MAX_DEPTH = 100
"""How deep the values of a message may be nested. Schemas may refer to themselves."""
MAX_VALUES = 5_000_000
"""How many values of the messages of one request are checked, over all revisions: seconds. A few
bytes of a message can stand for any number of values that take no bytes."""
_LONGEST_TEXT = 500
_LONGEST_END = 120
"""How much of each end of a long place is kept, so that there is room for the reason."""


class Malformed(Exception):
    """A definition is none of its type, with the reason."""


class Mismatch(Exception):
    """A message does not fit a schema."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._reason = reason
        self._place: list[str] = []

    def within(self, part: str) -> None:
        """Add a part of the place, from the inside to the outside."""
        self._place.append(part)

    def __str__(self) -> str:
        """The place and the reason, shortened if the schema has long names."""
        place = "".join(reversed(self._place)).removeprefix(".")
        if len(place) > 2 * _LONGEST_END:
            place = f"{place[:_LONGEST_END]}...{place[-_LONGEST_END:]}"
        return (f"{place}: {self._reason}" if place else self._reason)[:_LONGEST_TEXT]


class Budget:
    """What may still be looked at for one request."""

    def __init__(self, values: int = MAX_VALUES) -> None:
        self._values = values

    def enter(self, depth: int, values: int = 1) -> None:
        """Take note of a value.

        Args:
            depth: how many values it is in.
            values: what looking at it costs, in values.

        Raises:
            Mismatch: it is nested too deep, or there were too many.
        """
        if depth > MAX_DEPTH:
            raise Mismatch(f"it is nested deeper than {MAX_DEPTH} levels")
        self._values -= values
        if self._values < 0:
            raise Mismatch("the messages have more values than the embedded server checks")
