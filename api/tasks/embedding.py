"""Predictions with embedding models: one or more texts, and a vector for each.

Also builds the inputs of embedding jobs from texts or token lists, within the model's limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, model_validator

from api.bodies import Body, Text
from api.chat_bodies import text_or_list
from api.inputs.source_images import ImageCaller, SourceImages
from api.tasks.base import ApiTask, Inputs
from shared.errors import BadInput, InputTooLarge, ModelFailed
from shared.models.catalog import Model
from shared.models.tasks.embedding import TextInput, TextTokens, TokensInput, Truncate

TOKEN_BYTES = 4
"""Number of bytes a token ID counts toward the input limit, because a token is about four bytes of
text.
"""

WindowUnit = Literal["sentence", "tokens"]
MAX_LONG_TEXT_BYTES = 4 * 1024 * 1024
"""Maximum amount of text per request: about 1,200 pages, which is more than the windows can hold.

Splitting a text into windows is free of charge, so it needs a limit.
"""
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n")
# A match begins at the first character of a run and covers the whole run, so the time is linear in
# the length of the text.
_SENTENCE_END = re.compile(
    r"""(?: (?<![.!?…])[.!?…]++["'”’»)\]]*+\s++
          | (?<![。！？｡])[。！？｡]++[”’」』）]*+\s*+
          | (?<!\s)[^\S\n]*+\n[^\S\n]*+\n\s*+
        )(?=(\S))""",
    re.VERBOSE,
)
_INITIAL = re.compile(r"(?:^|[\s(.])[^\W\d_]\.\s+$")
_LOOK_BACK = 32
_LONGEST_WORD = 4096
"""Maximum number of characters to move back from a section's end to find the end of a word."""

MAX_TEXTS = 128
"""A prediction is one message and its reply is another. Both must stay well below Pub/Sub's 10 MB
limit.
"""
MAX_TEXT_BYTES = 1024 * 1024
_VECTOR = {"type": "array", "items": {"type": "number"}}

TextOrTexts = Annotated[
    Annotated[Text, Tag("text:")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("list:")],
    Discriminator(text_or_list),
]


def text_inputs(
    texts_or_tokens: str | list[str] | list[int] | list[list[int]],
    model: Model,
    *,
    truncate: Truncate = "none",
    tokenizer: str | None = None,
    field: str = "input",
) -> list[TextInput | TokensInput]:
    """Returns the inputs in the order of the texts or token lists.

    Args:
        texts_or_tokens: one or more texts or token lists.
        truncate: the side on which to cut a text that is too long.
        tokenizer: the model whose tokenizer produced the token IDs, according to the caller.
        field: name of the request field, for error messages.

    Raises:
        BadInput: there are too many inputs, or token IDs without the name of the model's tokenizer.
        InputTooLarge: an input is too long for the model.
    """
    listed = (
        [texts_or_tokens]
        if isinstance(texts_or_tokens, str) or isinstance(texts_or_tokens[0], int)
        else texts_or_tokens
    )
    if len(listed) > model.text.max_items:
        raise BadInput(
            f"{field}: must have at most {model.text.max_items} items, got {len(listed)}",
            field=field,
        )
    if tokenizer is not None or not isinstance(listed[0], str):
        _check_tokenizer(tokenizer, model)
    most_bytes = model.text.max_input_bytes
    inputs: list[TextInput | TokensInput] = []
    for index, text_or_tokens in enumerate(listed):
        if isinstance(text_or_tokens, str):
            size, limit, unit = len(text_or_tokens.encode()), most_bytes, "bytes"
            inputs.append(TextInput(text_or_tokens, truncate))
        else:
            size, limit, unit = len(text_or_tokens), most_bytes // TOKEN_BYTES, "tokens"
            inputs.append(TokensInput(text_or_tokens, truncate))
        if size > limit:
            raise InputTooLarge(f"{field}[{index}]: must be at most {limit} {unit}", field=field)
    return inputs


def _check_tokenizer(tokenizer: str | None, model: Model) -> None:
    """Rejects IDs from other tokenizers, whose vocabularies would yield wrong vectors."""
    if tokenizer is None:
        raise BadInput(
            "input: token IDs are meaningless without their tokenizer. Send texts "
            "(LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)). If these IDs "
            f'are from this model\'s own tokenizer, also send "tokenizer": "{model.name}"',
            field="input",
        )
    if tokenizer not in (model.name, *model.aliases):
        reason = f'{model.name} only accepts token IDs from its own tokenizer; send "{model.name}"'
        raise BadInput(f"tokenizer: {reason}", field="tokenizer")


class Window(NamedTuple):
    """Part of a text, in characters (Unicode code points, from 0; `end` is exclusive)."""

    start: int
    end: int
    is_exact: bool
    """True if the window starts and ends between words, so that its tokens are the same as in the
    whole text.
    """


def sections_of(text: str, max_bytes: int) -> list[str]:
    """Splits a text into sections of at most `max_bytes`, between words.

    Sections are tokenized separately.

    A word that is longer may be cut anywhere.
    """
    longest = max_bytes if text.isascii() else max_bytes // 4
    sections, at = [], 0
    while len(text) - at > longest:
        end = at + longest
        least = max(at, end - _LONGEST_WORD)
        end_at = next((place for place in range(end, least, -1) if text[place].isspace()), end)
        sections.append(text[at:end_at])
        at = end_at
    return [*sections, text[at:]]


def sentence_starts(text: str) -> list[int]:
    """Returns the positions at which sentences begin.

    A sentence ends after `.`, `!`, `?`, or `…` followed by whitespace, unless a lowercase letter
    follows, or after a blank line, as in UAX #29 (https://www.unicode.org/reports/tr29/, SB4, SB8,
    SB11). It does not end after an initial, or at a line break, because many texts have lines of
    fixed width.
    """
    starts = [0]
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        before = text[max(0, end - _LOOK_BACK) : end]
        is_other = _BLANK_LINE.search(match[0]) is not None
        if is_other or not (match[1].islower() or _INITIAL.search(before)):
            starts.append(end)
    return starts


def windows_of(
    text: str,
    sections: Sequence[TextTokens],
    *,
    lengths: Sequence[int],
    tokens: int,
    overlap: int,
    by: WindowUnit,
    max_windows: int,
) -> list[Window]:
    """Splits a text into windows of at most `tokens` tokens.

    A window ends after a whole sentence or word. A unit that is longer than a window is split into
    the next smaller unit: a sentence between words, a word between tokens.

    Args:
        sections: tokens in each of the text's sections, in order.
        lengths: length of each section, in characters.
        tokens: the maximum number of tokens per window, not counting special tokens.
        overlap: maximum number of tokens that a window repeats from the previous window, in whole
            units.
        by: the unit at whose boundaries windows begin and end.
        max_windows: stop once there is one more window than this.
    """
    starts = _token_starts(sections, lengths)
    if not len(starts):
        return [Window(0, len(text), True)]
    begins = np.frombuffer(b"".join(section.begins_word for section in sections), np.uint8) == 1
    characters = np.flatnonzero(np.diff(starts, prepend=-1) > 0)
    words = np.flatnonzero(begins)
    units = [words, characters]
    if by == "sentence":
        sentences = np.searchsorted(starts, sentence_starts(text))
        units.insert(0, np.unique(words[np.searchsorted(words, sentences[sentences <= words[-1]])]))
    cuts = list(_cuts(len(starts), units, tokens, overlap, max_windows))
    return [_window(text, starts, begins, begin, end) for begin, end in cuts]


def _token_starts(sections: Sequence[TextTokens], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Returns where each token starts, as a character position in the whole text."""
    offsets = np.cumsum([0, *lengths[:-1]])
    return np.concatenate(
        [
            np.frombuffer(section.starts, "<u4").astype(np.int64) + offset
            for section, offset in zip(sections, offsets, strict=True)
        ]
    )


def _cuts(
    count: int, units: Sequence[NDArray[np.int64]], tokens: int, overlap: int, max_windows: int
) -> Iterator[tuple[int, int]]:
    """Yields the index of each window's first token and of the token after its last."""
    begin = 0
    for _ in range(max_windows + 1):
        if begin + tokens >= count:
            yield begin, count
            return
        end = next(
            (last for unit in units if (last := _last_up_to(unit, begin + tokens)) > begin),
            begin + tokens,
        )
        yield begin, end
        unit = units[0]
        place = int(np.searchsorted(unit, max(begin + 1, end - overlap)))
        begin = min(end, int(unit[place])) if overlap and place < len(unit) else end


def _last_up_to(unit: NDArray[np.int64], limit: int) -> int:
    place = int(np.searchsorted(unit, limit, side="right"))
    return int(unit[place - 1]) if place else 0


def _window(
    text: str, starts: NDArray[np.int64], begins: NDArray[np.bool_], begin: int, end: int
) -> Window:
    last = len(text) if end == len(starts) else int(starts[end])
    first = int(starts[begin])
    whole = text[first:last]
    is_exact = bool(begins[begin]) and (end == len(starts) or bool(begins[end]))
    leading = len(whole) - len(whole.lstrip())
    return Window(first + leading, first + max(leading, len(whole.rstrip())), is_exact)


class TextsInput(Body):
    """Input for embedding models: exactly one of `text`, `texts`, and `input`."""

    text: Text | None = Field(None, description="One text. The output is its vector.")
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Several texts. The output is a list of vectors."
    )
    input: TextOrTexts | None = Field(None, description="One text or several.")
    truncate: Literal["end", "start"] | None = Field(
        None, description="The side of an overlong text to cut. Without it, the prediction fails."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> TextsInput:
        if sum(value is not None for value in (self.text, self.texts, self.input)) != 1:
            raise ValueError("exactly one of text, texts and input is required")
        return self

    @property
    def field(self) -> str:
        """The name of the field with the text or texts."""
        return next(name for name in ("text", "texts", "input") if getattr(self, name) is not None)

    @property
    def given(self) -> str | list[str]:
        """The text or texts."""
        value = self.text or self.texts or self.input
        assert value is not None, "validated when the body was read; this is a bug"
        return value


class EmbeddingApi(ApiTask):
    """The output is a vector, or a list of vectors."""

    input_schema = TextsInput
    output_schema: ClassVar = {"anyOf": [_VECTOR, {"type": "array", "items": _VECTOR}]}

    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one item per text."""
        parsed = TextsInput.model_validate(raw_input, strict=True)
        field = parsed.field
        inputs = text_inputs(parsed.given, model, truncate=parsed.truncate or "none", field=field)
        check_texts([parsed.given] if isinstance(parsed.given, str) else parsed.given, field)
        return Inputs(inputs, raw_input, not isinstance(parsed.given, str), is_repeatable=True)


def check_texts(texts: list[str], field: str) -> None:
    """Checks that the texts fit in one prediction.

    Args:
        field: name of the request field, for error messages.

    Raises:
        BadInput: there are too many texts.
        InputTooLarge: the texts are too long.
    """
    if len(texts) > MAX_TEXTS:
        raise BadInput(
            f"{field}: must have at most {MAX_TEXTS} texts per prediction, got {len(texts)}",
            field=field,
        )
    if sum(len(text.encode()) for text in texts) > MAX_TEXT_BYTES:
        raise InputTooLarge(
            f"{field}: must be at most {MAX_TEXT_BYTES} bytes in total", field=field
        )


TASK = EmbeddingApi()


def normalize_rows(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the matrix with every row scaled to length 1.

    Raises:
        ModelFailed: a row is all zeros.
    """
    doubles = matrix.astype(np.float64)  # the squares of large floats overflow
    lengths = np.linalg.norm(doubles, axis=1, keepdims=True)
    if not lengths.all():
        raise ModelFailed("the model returned a vector that is zero in all requested dimensions")
    scaled: NDArray[np.float32] = (doubles / lengths).astype("<f4")
    return scaled
