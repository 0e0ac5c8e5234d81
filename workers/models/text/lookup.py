"""Guesses how a text goes on: as it did after the same words before, in its prompt or in itself.

The model checks a guess in one pass, and what it would not have written is dropped. So a text stays
what it is, and one that quotes is written in fewer passes. Saxena, Prompt lookup decoding, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

_MATCHED_TOKENS = 3
"""That must be equal. Two occur by chance too often, and a wrong guess costs time."""
_FIRST_GUESS_TOKENS = 4


class Lookup:
    """The guesses for one text.

    Args:
        most: tokens of a guess.
    """

    def __init__(self, most: int) -> None:
        self._longest = most
        self._now = min(_FIRST_GUESS_TOKENS, most)
        self._next: dict[tuple[int, ...], int] = {}
        """Where a text went on after these tokens, the last time."""
        self._known = _MATCHED_TOKENS

    def guess(self, ids: Sequence[int], room: int) -> list[int]:
        """The tokens after `ids`, at most `room`. Empty: the end of `ids` was not there before.

        Args:
            ids: all tokens of the text so far. Those of the last call, and more.
            room: the most tokens that are of use.
        """
        for at in range(self._known, len(ids)):
            self._next[tuple(ids[at - _MATCHED_TOKENS : at])] = at
        self._known = max(self._known, len(ids))
        found = self._next.get(tuple(ids[-_MATCHED_TOKENS:]))
        if found is None:
            return []
        period = len(ids) - found
        # What reaches the end of the text goes on with itself.
        return [ids[found + place % period] for place in range(min(self._now, room))]

    def learn(self, guessed: int, right: int) -> None:
        """Makes the next guess longer after one that was right, and as long as was right else."""
        self._now = min(2 * guessed, self._longest) if right == guessed else max(1, right)
