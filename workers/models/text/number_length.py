"""How long the number is that JSON ends with so far."""

from __future__ import annotations

MOST_DIGITS = 20
"""A double holds 17. A model that repeats itself would write a longer one until its tokens end."""
_IN_NUMBERS = frozenset("+-.eE")


class NumberLength:
    """Reads JSON as it comes, and counts the digits at its end. Digits in strings do not count."""

    def __init__(self) -> None:
        self._is_in_string = False
        self._is_escaped = False
        self._digits = 0

    @property
    def is_full(self) -> bool:
        """Whether the number at the end should not get another digit."""
        return self._digits >= MOST_DIGITS

    def read(self, text: str) -> None:
        """Takes more of the text in."""
        for character in text:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string and character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = not self._is_in_string
            if self._is_in_string or character not in _IN_NUMBERS:
                is_digit = not self._is_in_string and "0" <= character <= "9"
                self._digits = self._digits + 1 if is_digit else 0
