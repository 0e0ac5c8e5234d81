"""A worker without a model: it takes jobs from an in-memory or real broker and replies
deterministically.
"""

import asyncio
import base64
import io
import json
import math
import random
import re
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import msgspec
import numpy as np
from PIL import Image

from shared.broker.transport import (
    Admin,
    Subscription,
    SubscriptionSettings,
    Transport,
    jobs_topic_id,
    workers_subscription_id,
)
from shared.errors import BadInput, DeadlineExceeded, ModelFailed, PenstockError
from shared.messages import (
    Item,
    ItemError,
    ItemOutcome,
    Job,
    Receipt,
    Reply,
    ReplyBody,
    decode_job,
    encode_reply,
    encode_reply_body,
    failure,
)
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.tasks import Input, Result
from shared.models.tasks.custom import (
    CustomInput,
    CustomResult,
    FilePlace,
    StreamedElement,
    StreamedFile,
    file_digest,
    make_streamed_file,
)
from shared.models.tasks.embedding import EmbeddingResult, TextInput, TextTokens, TokensInput
from shared.models.tasks.image import ImageInput, ImageResult
from shared.models.tasks.similarity import SimilarityInput, SimilarityResult
from shared.models.tasks.text import (
    GenerationInput,
    GenerationResult,
    PromptToCount,
    TokenChunk,
    TokenCount,
    TokenLogprob,
)
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore, object_key
from shared.stores.token_streams import Written
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from workers.models.base import PreparedText, Preparer


def vector_of(given: Input, dimensions: int = 384) -> np.ndarray:
    """The vector for a text or token list: of unit length, and different for every input."""
    if not isinstance(given, ImageInput):
        given = msgspec.structs.replace(given, truncate="end")  # has no effect on short texts
    seed = zlib.crc32(repr(given).encode())
    vector = np.random.default_rng(seed).standard_normal(dimensions).astype("<f4")
    unit: np.ndarray = (vector / np.linalg.norm(vector)).astype("<f4")
    return unit


def png_of(given: ImageInput) -> bytes:
    """A single-color image, derived from the seed and the number of steps."""
    color = (given.seed % 256, given.seed // 256 % 256, given.steps % 256)
    buffer = io.BytesIO()
    Image.new("RGB", (given.width, given.height), color).save(buffer, "png")
    return buffer.getvalue()


LAST_WORD = "END"
"""The last word of a text that stops on its own."""
MAX_PROMPT_WORDS = 10
"""Extra words in an image prompt are reported as truncated, as a real worker reports truncated
tokens.
"""


PROMPT_TOKENS, CACHED_TOKENS = 7, 3
"""Token counts for every prompt."""


class FakeWorker:
    """Serves all of `models`.

    While `go` is cleared, every reply is held back. `broken` texts and prompts fail. With a cache,
    results are stored as a real worker stores them. `jobs` lists jobs in order of arrival. With
    `is_silent`, it takes jobs and never replies. `stores_results_in` receives all images. Jobs from
    the requests in `unreadable` are reported as invalid. With a `preparer`, text is checked and
    truncated as in a real worker, and its vector consists of its token ids. `jitter` makes replies
    arrive out of order. With records, predictions are claimed and finished as in a real worker.
    """

    def __init__(
        self,
        transport: Transport,
        models: tuple[Model, ...],
        cache: ResultCache | None = None,
        stores: RecordStores | None = None,
    ) -> None:
        self._transport = transport
        self._models = models
        self._cache = cache
        self.stores = stores
        self._tasks: set[asyncio.Task[None]] = set()
        self.jobs: list[Job] = []
        self.taken = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.claimed = asyncio.Event()
        self.broken = {"broken"}
        self.refusal: PenstockError | None = None
        """The error for every item, as if the worker had rejected it."""
        self.is_silent = False
        self.unreadable: set[str] = set()
        self.stores_results_in: ObjectStore | None = None
        self.jitter: random.Random | None = None
        self.preparer: Preparer | None = None
        self.written = asyncio.Semaphore(10**6)
        """Number of tokens that texts may still generate."""

    @property
    def items(self) -> list[Item]:
        return [item for job in self.jobs for item in job.body.items]

    @asynccontextmanager
    async def running(self, admin: Admin) -> AsyncIterator["FakeWorker"]:
        for model in self._models:
            await admin.ensure_topic(jobs_topic_id(model.name))
            settings = SubscriptionSettings(jobs_topic_id(model.name))
            await admin.ensure_subscription(workers_subscription_id(model.name), settings)
        loops = [asyncio.create_task(self._serve(model)) for model in self._models]
        try:
            yield self
        finally:
            tasks = [*loops, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until_taken(self, jobs: int) -> None:
        """Waits until this many jobs have arrived in total."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(self.jobs) < jobs:
                self.taken.clear()
                await self.taken.wait()

    async def _serve(self, model: Model) -> None:
        opened = self._transport.subscribe(workers_subscription_id(model.name), max_messages=1000)
        async with opened as subscription:
            async for message in subscription:
                job = decode_job(message.data, message.attributes)
                self.jobs.append(job)
                self.taken.set()
                if self.is_silent:
                    subscription.ack(message)
                    continue
                task = asyncio.create_task(self._answer(model, job, message, subscription))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, model: Model, job: Job, message: object, subscription: Subscription
    ) -> None:
        pulled_at_s, envelope = time.time(), job.envelope
        is_prediction = bool(envelope.prediction) and self.stores is not None
        if is_prediction and not await self._claimed(envelope.request_id):
            subscription.ack(message)  # type: ignore[arg-type]
            return
        await self.go.wait()
        if is_prediction and self.refusal is None:
            await asyncio.gather(*(self._write(job, item) for item in job.body.items))
        for _ in range(self.jitter.randrange(30) if self.jitter else 0):
            await asyncio.sleep(0)
        outcomes = [self._outcome(item, job, pulled_at_s) for item in job.body.items]
        if self.stores_results_in is not None:
            for outcome in outcomes:
                await _store(outcome, self.stores_results_in)
        is_unreadable = envelope.request_id in self.unreadable
        if self._cache is not None and job.body.cache_write and not is_unreadable:
            kept = {
                item.cache_key: outcome.result
                for item, outcome in zip(job.body.items, outcomes, strict=True)
            }
            await self._cache.put_many(
                {key: result for key, result in kept.items() if key and result}, 60
            )
        body = ReplyBody(outcomes, worker="fake", device="none", replied_at_s=time.time())
        if is_unreadable:
            body = ReplyBody(
                [], ItemError("undecodable_message", "attributes: it could not be read"), "fake"
            )
        if is_prediction and self.stores is not None:
            is_good = all(outcome.result is not None for outcome in outcomes)
            state: Literal["succeeded", "failed"] = "succeeded" if is_good else "failed"
            await self.stores.records.finish(envelope.request_id, state, encode_reply_body(body))
        if not envelope.inbox:
            subscription.ack(message)  # type: ignore[arg-type]
            return
        data, attributes = encode_reply(
            Reply(envelope.request_id, envelope.part, envelope.slot, body)
        )
        with suppress(BadInput):  # the inbox was deleted along with its instance
            await self._transport.publish(envelope.inbox, data, attributes)
        subscription.ack(message)  # type: ignore[arg-type]

    async def _write(self, job: Job, item: Item) -> None:
        """Writes a text's tokens one by one if it has a reader, until the text is complete."""
        if not getattr(item.input, "is_streamed", False):
            return
        assert self.stores is not None
        if isinstance(item.input, CustomInput):
            if _is_document(item.input):
                elements = [StreamedElement(one) for one in _pages_of(item.input).output]
            elif "input" in item.input.values:
                elements = [StreamedElement(None, [one]) for one in _parts_of(item.input)]
            else:
                elements = [StreamedElement(one) for one in segments_of(item.input)]
            pieces = [(one.line, list[TokenLogprob]()) for one in elements]
        else:
            assert isinstance(item.input, GenerationInput)
            pieces = [(word, _logprobs(item.input, [word])) for word in words_of(item.input)]
        for number, (text, logprobs) in enumerate(pieces):
            await self.written.acquire()
            chunk = TokenChunk(number, [number], text, logprobs)
            if number == 0 and isinstance(item.input, GenerationInput):
                chunk.input_tokens, chunk.cached_tokens = PROMPT_TOKENS, CACHED_TOKENS
            written = Written(job.envelope.request_id, item.index, self.attempt, chunk)
            if await self.stores.tokens.append([written]) == [None]:
                return

    async def _claimed(self, record: str) -> bool:
        """True if this worker must run the prediction."""
        assert self.stores is not None
        (claim,) = await self.stores.records.claim([record])
        self.claimed.set()
        self.attempt = claim.attempt if claim is not None else 1
        return claim is None or claim.state == "processing"

    def _outcome(self, item: Item, job: Job, pulled_at_s: float) -> ItemOutcome:
        now_s = time.time()
        receipt = Receipt(
            cache="miss", pulled_at_s=pulled_at_s, started_at_s=now_s, finished_at_s=now_s
        )
        receipt.batch_wait_ms, receipt.inference_ms, receipt.batch_size = (
            1.5,
            2.5,
            len(job.body.items),
        )
        if job.envelope.deadline_s < now_s:
            return failure(item.index, DeadlineExceeded(), receipt)
        if self.refusal is not None:
            return failure(item.index, self.refusal, receipt)
        # A prompt may be a list of tokens, which can't be looked up in a set.
        if getattr(item.input, "text", getattr(item.input, "prompt", "")) in [*self.broken]:
            return failure(item.index, ModelFailed("this input breaks the model"), receipt)
        if self.preparer is None:
            result = _result(item.input)
        else:
            (prepared,) = self.preparer.prepare([item.input])
            if isinstance(prepared, BadInput):
                return failure(item.index, prepared, receipt)
            if isinstance(prepared, TextTokens):
                result = prepared
            else:
                assert isinstance(prepared, PreparedText)
                result = EmbeddingResult(prepared.ids, prepared.length, prepared.truncated_tokens)
        receipt.count(result)
        return ItemOutcome(item.index, "succeeded", receipt, result)


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop sequence, and that sequence; empty if there is none."""
    at, stop = min(((text.find(one), one) for one in stops if one in text), default=(len(text), ""))
    return text[:at], stop


def words_of(given: GenerationInput) -> list[str]:
    """The text's tokens: the words after `say ` in the prompt, or else numbers."""
    prompt = given.messages[-1]["content"] if given.messages else given.prompt
    if isinstance(prompt, str) and prompt.startswith("say "):
        text, _ = until_stop(prompt.removeprefix("say "), given.stop)
        said: list[str] = re.findall(r"\S+\s*", text)
        return said[: given.max_tokens]
    return [f"{given.seed % 10}-{number} " for number in range(given.max_tokens)]


def _stop_of(given: GenerationInput, said: list[str]) -> str:
    """The stop sequence that ended the text. Empty if none did."""
    prompt = given.messages[-1]["content"] if given.messages else given.prompt
    if not isinstance(prompt, str):
        return ""
    text, stop = until_stop(prompt.removeprefix("say "), given.stop)
    return stop if "".join(said) == text else ""


def segments_of(recording: CustomInput) -> list[dict[str, Any]]:
    """Speech segments in a "recording": text whose lines take a second and a half each."""
    (file,) = recording.files
    assert file.data is not None, "a small one"
    said = file.data.decode().splitlines()
    about = {"language": recording.values.get("language") or "en", "duration": 1.5 * len(said)}
    if said == ["no times"]:
        return [about]
    if not said:
        return [about | {"start": 0.0, "end": 0.0, "text": ""}]
    return [
        about
        | {"id": number, "start": 1.5 * number, "end": 1.5 * number + 1.25, "text": f" {line}"}
        | {"tokens": [number], "avg_logprob": -0.5, "words": _words_in(recording, number, line)}
        for number, line in enumerate(said)
    ]


def _words_in(recording: CustomInput, number: int, line: str) -> list[dict[str, Any]]:
    if not recording.values.get("word_timestamps"):
        return []
    return [
        {"word": f" {word}", "start": 1.5 * number + 0.1 * at, "end": 1.5 * number + 0.1 * at + 0.1}
        for at, word in enumerate(line.split())
    ]


def data_in(uri: str) -> bytes:
    """The bytes of a `data:` URI."""
    return base64.b64decode(uri.partition(",")[2])


def _parts_of(text: CustomInput) -> list[StreamedFile]:
    """One file per spoken word."""
    words = [f"{word} ".encode() for word in text.values["input"].split()]
    return [
        make_streamed_file([], number, file_digest(word), Blob("audio/mpeg", data=word))
        for number, word in enumerate(words)
    ]


def _is_document(given: CustomInput) -> bool:
    return [place.at for place in given.places] == [["document"]]


def _pages_of(document: CustomInput) -> CustomResult:
    """Pages read from a "document", which is text with one page per line.

    The line "image" contains an image; "crowded" also has many references and words.
    """
    (file,) = document.files
    assert file.data is not None, "a small one"
    lines, values = file.data.decode().splitlines(), document.values
    asked = values.get("pages") or f"0-{len(lines) - 1}"
    spans = [part.partition("-") for part in asked.split(",")]
    chosen = [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]
    if lines == ["no pages"]:
        return CustomResult([{"text": "?"}], streams="items")
    pages: list[dict[str, Any]] = []
    files, places = [], []
    for index in chosen:
        page: dict[str, Any] = {"index": index, "markdown": lines[index], "images": []}
        page["dimensions"] = {"dpi": 150, "height": 1650, "width": 1275}
        if lines[index] in ("image", "crowded"):
            below, many = ("below", 1) if lines[index] == "image" else ("[a](a) " * 100_000, 20_000)
            page["markdown"] = f"![img-0.jpeg](img-0.jpeg) {below}"
            places_of_words = range(26, 26 + 35 * many, 35)
            words = [{"text": "a", "confidence": 0.5, "start_index": at} for at in places_of_words]
            scores = {"average_page_confidence_score": 0.5, "minimum_page_confidence_score": 0.5}
            page["confidence_scores"] = scores | {"word_confidence_scores": words}
            corners = {"top_left_x": 1, "top_left_y": 2, "bottom_right_x": 3, "bottom_right_y": 4}
            page["images"].append({"id": "img-0.jpeg", **corners})
            if values.get("include_image_base64"):
                page["images"][0]["image_base64"] = None
                places.append(FilePlace([len(pages), "images", 0, "image_base64"]))
                files.append(Blob("image/jpeg", data=b"jpeg"))
        pages.append(page)
    metrics = {"doc_size_bytes": len(file.data)}
    return CustomResult(
        pages, files, places, streams="items", metrics=metrics, work=max(1, len(pages))
    )


def _custom_result(given: CustomInput) -> CustomResult:
    """A transcript, spoken text, or the input itself."""
    values = given.values
    if [place.name for place in given.places][:1] in (["recording.wav"], ["recording"]):
        segments = segments_of(given)
        if values.get("task") == "translate":
            segments = [one | {"text": one["text"].upper()} for one in segments]
        work = max(1, math.ceil(segments[0]["duration"]))
        return CustomResult(segments, streams="items", work=work)
    if given.is_streamed and "input" in values:
        parts = [(one, Blob(one.media_type, data=data_in(one.uri))) for one in _parts_of(given)]
        places = [FilePlace([one.number], digest=one.digest) for one, _ in parts]
        files = [blob for _, blob in parts]
        return CustomResult([None] * len(files), files, places, "items", work=len(values["input"]))
    if _is_document(given):
        return _pages_of(given)
    if "input" in values:
        sound = Blob("audio/x-wav", data=json.dumps(values, sort_keys=True).encode())
        return CustomResult(None, [sound], [FilePlace([])], work=len(values["input"]))
    output = {"values": values, "names": [place.name for place in given.places]}
    if not (size := values.get("size", 0)):
        return CustomResult(output)
    file = Blob("text/plain", data=b"x" * size)
    return CustomResult(output | {"made": None}, [file], [FilePlace(["made"])])


def _logprobs(given: GenerationInput, words: list[str]) -> list[TokenLogprob]:
    if given.logprobs < 0:
        return []
    top = [TokenLogprob("other", -2.5, b"other")] * given.logprobs
    return [TokenLogprob(word, -0.5, word.encode(), top) for word in words]


async def _store(outcome: ItemOutcome, objects: ObjectStore) -> None:
    if isinstance(outcome.result, ImageResult) and outcome.result.image.data is not None:
        image, data = outcome.result.image, outcome.result.image.data
        image.object_key, image.data = object_key("results", data, image.media_type), None
        await objects.put(image.object_key, data, image.media_type)


def _result(given: Input) -> Result:
    if isinstance(given, ImageInput):
        image = Blob("image/png", data=png_of(given))
        pixel_steps = given.width * given.height * given.steps
        left_out = max(
            0, len(given.prompt.split()) + len(given.negative_prompt.split()) - MAX_PROMPT_WORDS
        )
        return ImageResult(image, given.width, given.height, given.seed, pixel_steps, left_out)
    if isinstance(given, GenerationInput):
        said = words_of(given)
        stop = _stop_of(given, said)
        is_stopped = bool(stop) or (bool(said) and said[-1].strip() == LAST_WORD)
        reason: Literal["stop", "length"] = "stop" if is_stopped else "length"
        read, cached, written = PROMPT_TOKENS, CACHED_TOKENS, len(said)
        result = GenerationResult(
            "".join(said), reason, read + written, read, written, cached, _logprobs(given, said)
        )
        result.stop_sequence = stop
        if given.is_echoed:
            echoed = [f"<{one}>" for one in given.prompt]
            result.prompt_text, result.prompt_logprobs = "".join(echoed), _logprobs(given, echoed)
        return result
    if isinstance(given, PromptToCount):
        text = given.prompt or " ".join(one["content"] for one in given.messages)
        ids = b"".join(len(word).to_bytes(4, "little") for word in text.split())
        return TokenCount(len(ids) // 4, ids if given.wants_ids else b"")
    if isinstance(given, SimilarityInput):
        first, second = (vector_of(TextInput(one)) for one in (given.text, given.query))
        return SimilarityResult(float(np.clip(first @ second, -1, 1)), 4)
    if isinstance(given, CustomInput):
        return _custom_result(given)
    assert isinstance(given, TextInput | TokensInput), "no other task is answered here"
    words = given.text.split() if isinstance(given, TextInput) else given.tokens
    return EmbeddingResult(vector_of(given).tobytes(), len(words) + 2)
