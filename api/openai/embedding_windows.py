"""Windows for long texts: splits texts as `chunk` specifies, and describes their vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, cast

import msgspec
import numpy as np

from api.batches.files import BatchFiles
from api.http.call import Call, ModelCall
from api.http.inference import Inference
from api.http.request_options import PRIORITY_HEADER
from api.inputs.files import Files
from api.openai.embeddings_schemas import (
    Chunk,
    EmbeddingItem,
    EmbeddingsBody,
    EmbeddingsReply,
    EmbeddingWindow,
    FileOfText,
)
from api.tasks.base import check_results
from api.tasks.embedding import (
    MAX_LONG_TEXT_BYTES,
    Window,
    normalize_rows,
    sections_of,
    windows_of,
)
from shared.errors import BadInput, InputTooLarge
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.models.tasks.embedding import (
    TextInput,
    TextTokens,
    TextToTokenize,
)


class _LongText(NamedTuple):
    """One of a request's texts, and the windows it was split into."""

    text: str
    windows: list[Window]

    def inputs(self) -> list[TextInput]:
        """One item per window.

        Each item is identical to an item for the same text sent by itself, so the two share cache
        entries and batches.
        """
        return [
            TextInput(self.text[window.start : window.end], "none" if window.is_exact else "end")
            for window in self.windows
        ]


class Windows:
    """A request's texts, split into windows.

    Args:
        is_pooled: True if each text has one vector, the mean of its windows' vectors.
    """

    def __init__(self, texts: Sequence[_LongText], *, is_pooled: bool) -> None:
        self._texts = texts
        self._is_pooled = is_pooled

    @property
    def inputs(self) -> list[TextInput]:
        """One item per window, in order."""
        return [value for text in self._texts for value in text.inputs()]

    def describe(self, reply: EmbeddingsReply, outcomes: Sequence[ItemOutcome]) -> None:
        """Labels each vector with its window, and pools each text's vectors."""
        windows = (
            (number, window) for number, text in enumerate(self._texts) for window in text.windows
        )
        for item, outcome, (number, window) in zip(reply.data, outcomes, windows, strict=True):
            tokens = int(getattr(outcome.result, "tokens", 0))
            item.window = EmbeddingWindow(number, window.start, window.end, tokens)
        if self._is_pooled:
            self._pool(reply)

    def _pool(self, reply: EmbeddingsReply) -> None:
        """Replaces the vectors of each text's windows with their mean, weighted by token count."""
        groups: list[list[EmbeddingItem]] = [[] for _ in self._texts]
        for item in reply.data:
            assert isinstance(item.window, EmbeddingWindow)
            groups[item.window.input].append(item)
        reply.data = []
        for number, group in enumerate(groups):
            windows = [cast(EmbeddingWindow, item.window) for item in group]
            as_bytes = isinstance(group[0].embedding, bytes)
            vectors = np.array(
                [
                    np.frombuffer(item.embedding, "<f4")
                    if isinstance(item.embedding, bytes)
                    else np.array(item.embedding, np.float32)
                    for item in group
                ]
            )
            mean = np.average(vectors, axis=0, weights=[window.tokens for window in windows])
            (unit,) = normalize_rows(mean[np.newaxis])
            vector = unit.tobytes() if as_bytes else unit.tolist()
            reply.data.append(EmbeddingItem(number, vector, windows=windows))


async def read_texts(
    call: Call, body: EmbeddingsBody, files: Files, batch_files: BatchFiles
) -> list[str]:
    """Returns the texts from a request that has `chunk`.

    Raises:
        BadInput: the request has token IDs, `truncate`, or a file that is not text.
        InputTooLarge: the texts are too long.
        NotFound: the file does not exist.
    """
    if body.truncate is not None or body.tokenizer is not None:
        field = "truncate" if body.truncate is not None else "tokenizer"
        raise BadInput(
            f"{field}: can't be combined with `chunk`, which requires whole texts", field=field
        )
    texts_or_file = body.input
    if isinstance(texts_or_file, FileOfText):
        data = await _read_upload(call, texts_or_file.file, files, batch_files)
        try:
            texts = [data.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise BadInput("input.file: must be valid UTF-8", field="input") from error
    else:
        texts = (
            [texts_or_file] if isinstance(texts_or_file, str) else cast(list[str], texts_or_file)
        )
    if not isinstance(texts[0], str):
        raise BadInput("input: must be text, not token IDs, when `chunk` is set", field="input")
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > MAX_LONG_TEXT_BYTES:
        raise InputTooLarge(f"input: must be at most {MAX_LONG_TEXT_BYTES} bytes", field="input")
    for index, text in enumerate(texts):
        if not text.strip():
            raise BadInput(f"input[{index}]: must contain words", field="input")
    return texts


async def _read_upload(call: Call, file_id: str, files: Files, batch_files: BatchFiles) -> bytes:
    """Returns the data in a file that the caller uploaded.

    Raises:
        BadInput: the file belongs to a batch.
        InputTooLarge: the file is too long.
        NotFound: the file does not exist.
    """
    too_long = f"input.file: must be at most {MAX_LONG_TEXT_BYTES} bytes"
    if batch_files.has_id(file_id):
        upload = await batch_files.find(call.tenant, file_id)
        if upload.size_bytes > MAX_LONG_TEXT_BYTES:
            raise InputTooLarge(too_long, field="input")
        data, _ = await batch_files.load(call.tenant, file_id, MAX_LONG_TEXT_BYTES)
        return data
    file = await files.find(call.tenant, file_id)
    if file.size > MAX_LONG_TEXT_BYTES:
        raise InputTooLarge(too_long, field="input")
    return await files.read(file)


async def cut_texts(
    call: ModelCall, texts: list[str], chunk: Chunk, model: Model, inference: Inference
) -> Windows:
    """Splits texts into windows, using tokens from a worker.

    Raises:
        BadInput: the windows would be too long for the model, or there would be too many.
    """
    parts = [sections_of(text, model.text.max_input_bytes) for text in texts]
    sections_to_tokenize = [TextToTokenize(section) for sections in parts for section in sections]
    _check_number(len(sections_to_tokenize), model)
    results = iter(await inference.ask(call, model, sections_to_tokenize))
    long_texts: list[_LongText] = []
    room = model.text.max_items
    for text, sections in zip(texts, parts, strict=True):
        tokens = check_results(islice(results, len(sections)), TextTokens, model)
        size = _window_tokens(chunk, tokens[0].max_tokens, model)
        least = math.ceil(sum(len(section.begins_word) for section in tokens) / size)
        _check_number(model.text.max_items - room + least, model)
        # Runs in a thread, because a 300-page text takes 50 ms.
        windows = await asyncio.to_thread(
            windows_of,
            text,
            tokens,
            lengths=[len(section) for section in sections],
            tokens=size,
            overlap=chunk.overlap,
            by=chunk.by,
            max_windows=room,
        )
        room -= len(windows)
        _check_number(model.text.max_items - room, model)
        long_texts.append(_LongText(text, windows))
    return Windows(long_texts, is_pooled=chunk.pool == "mean")


def _check_number(windows: int, model: Model) -> None:
    if windows > model.text.max_items:
        raise BadInput(
            f"input: exceeds the maximum of {model.text.max_items} windows per request; "
            "split it into several requests or use more tokens per window",
            field="input",
        )


def _window_tokens(chunk: Chunk, max_tokens: int, model: Model) -> int:
    """Returns the number of tokens per window."""
    tokens = chunk.tokens or max_tokens
    if tokens > max_tokens:
        raise BadInput(
            f"chunk.tokens: must be at most {max_tokens} for {model.name}, not counting special "
            "tokens",
            field="chunk.tokens",
        )
    if chunk.overlap > tokens // 2:
        raise BadInput(
            f"chunk.overlap: must be at most half of chunk.tokens ({tokens})", field="chunk.overlap"
        )
    return tokens


def run_as_batch(call: ModelCall, model: Model) -> None:
    """Sets a large request's priority to `batch` and its deadline to the model's maximum.

    Values chosen by the caller take precedence.
    """
    if PRIORITY_HEADER not in call.http.headers:
        call.context.facts.priority = "batch"
        call.context.headers[PRIORITY_HEADER] = "batch"
    if call.options.deadline_s is None:
        call.options = msgspec.structs.replace(call.options, deadline_s=model.deadline.longest_s)
