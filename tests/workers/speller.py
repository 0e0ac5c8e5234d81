"""A model process whose model spells its prompt over and over, one letter per step.

    python -m tests.workers.speller …       takes the arguments of workers.runtime.server

Prompts that start with these characters are special. `!`: the step fails. `†`: the process dies
once the item has two letters. `~`: in a batch, the device runs out of memory. `?`: the prompt is
rejected. `=`: the item gets `FIRST_LETTERS` letters at once, and no more until an item without this
character finishes. `%`: at the last letter, the text violates its schema. `#`: the schema allows no
continuation. `$`: the model fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import numpy as np

from shared.errors import BadInput, ModelFailed, PenstockError, SchemaNotMatched
from shared.models.tasks import Input
from shared.models.tasks.text import GenerationInput, GenerationResult, TokenChunk
from workers.models.base import OutOfMemory, PreparedItem, PreparedPrompt, StepEnd
from workers.runtime import server

STEP_S = 0.0005
"""Keeps an endless text small."""
FIRST_LETTERS = 50


class SpellerPreparer:
    """A token is a letter. An item takes at most 100 of the budget."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedPrompt | BadInput]:
        return [prompt_of(given) for given in inputs]


def prompt_of(given: Input) -> PreparedPrompt:
    """A prompt whose tokens are its letters."""
    assert isinstance(given, GenerationInput)
    assert isinstance(given.prompt, str)
    return PreparedPrompt(
        key="",
        length=min(len(given.prompt) + given.max_tokens, 100),
        ids=np.array([ord(letter) for letter in given.prompt], "<u4").tobytes(),
        max_tokens=given.max_tokens,
        seed=0,
        is_streamed=given.is_streamed,
    )


class _Generation:
    def __init__(self, item: PreparedPrompt) -> None:
        self.item = item
        self.prompt = "".join(map(chr, np.frombuffer(item.ids, "<u4")))
        self.letters = [chr(one) for one in np.frombuffer(item.written_ids, "<u4")]
        self.told = len(self.letters)
        self.computed = 0

    def write(self) -> None:
        self.letters.append(self.prompt[len(self.letters) % len(self.prompt)])
        self.computed += 1

    def chunk(self) -> TokenChunk | None:
        new, first = self.letters[self.told :], self.told
        self.told = len(self.letters)
        if not new:
            return None
        read = 0 if first else len(self.prompt)
        ids = [ord(letter) for letter in new]
        return TokenChunk(first, ids, "".join(new), input_tokens=read)

    @property
    def result(self) -> GenerationResult:
        text, read = "".join(self.letters), len(self.prompt)
        # The letters computed by this process let a test see whether the text was restarted.
        return GenerationResult(text, "length", read + len(text), read, len(text), self.computed)


_ENDS: dict[str, PenstockError] = {
    "%": SchemaNotMatched("the text does not match"),
    "#": BadInput("make the schema simpler", field="response_format"),
    "$": ModelFailed("no numbers for this text"),
}


class Speller:
    """The model."""

    device_name = "letters"

    def __init__(self) -> None:
        self._texts: dict[int, _Generation] = {}
        self._is_one_done = False

    def setup(self) -> None:
        """Does nothing, because there are no weights to load."""

    def warmup(self) -> None:
        """Does nothing, because there is nothing to compile."""

    def admit(self, slot: int, item: PreparedItem) -> None:
        assert isinstance(item, PreparedPrompt)
        text = _Generation(item)
        if text.prompt.startswith("?"):
            raise BadInput("no questions", field="prompt")
        if text.prompt.startswith("~") and self._texts:
            raise OutOfMemory("no room for a tilde")
        if _waits(text):
            for _ in range(FIRST_LETTERS - len(text.letters)):
                text.write()
        self._texts[slot] = text

    def step(self) -> StepEnd:
        time.sleep(STEP_S)
        end = StepEnd()
        for slot, text in self._texts.items():
            if text.prompt.startswith("!"):
                raise RuntimeError("a bang")
            if text.prompt.startswith("†") and len(text.letters) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if _waits(text) and not self._is_one_done:
                continue
            if len(text.letters) < text.item.max_tokens:
                text.write()
            if len(text.letters) >= text.item.max_tokens:
                end.results[slot] = _ENDS.get(text.prompt[0]) or text.result
        for slot in end.results:
            self._is_one_done |= not _waits(self._texts.pop(slot))
        return end

    def take_chunks(self) -> dict[int, TokenChunk]:
        streamed = {p: text for p, text in self._texts.items() if text.item.is_streamed}
        return {p: chunk for p, text in streamed.items() if (chunk := text.chunk()) is not None}

    def interrupt(self, slot: int) -> TokenChunk | None:
        return self._texts.pop(slot).chunk()

    def drop(self, slot: int) -> None:
        self._texts.pop(slot, None)


def _waits(text: _Generation) -> bool:
    return text.prompt.startswith("=")


def main() -> int:
    """Runs the model process with spellers instead of the catalog's models."""
    vars(server)["model_for"] = lambda *given, **options: Speller()
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
