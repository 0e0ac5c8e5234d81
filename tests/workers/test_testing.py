"""The worker that users test their models with."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import batch_subscription_id, workers_subscription_id
from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.entry import Batch, Generation
from shared.models.tasks import Input, Result
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.models.tasks.text import GenerationInput, GenerationResult, TokenChunk
from tests.workers.worker_harness import MODEL, LetterPreparer
from workers.models.base import OnStep, PreparedItem, PreparedPrompt, PreparedText, StepEnd
from workers.testing import running_worker

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
WRITER = Model(
    name="writer",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=64, max_items=4),
    generation=Generation(context_tokens=32, default_tokens=4, longest_tokens=8),
)


class Letters:
    device_name = "cpu"
    pads = False

    def __init__(self) -> None:
        self.loads = 0

    def setup(self) -> None:
        self.loads += 1

    def warmup(self) -> None:
        pass

    def groups(self, batch: Sequence[PreparedItem]) -> list[list[int]]:
        return [list(range(len(batch)))]

    def computed_work(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        return [
            EmbeddingResult(4 * item.ids, item.length)
            for item in batch
            if isinstance(item, PreparedText)
        ]


class Refused(Letters):
    def setup(self) -> None:
        raise ConfigurationError("the folder has no weights", field="source")


class Broken(Letters):
    def setup(self) -> None:
        raise RuntimeError("a bug of the model's author")


class Miscounting(Letters):
    def predict(
        self, batch: Sequence[PreparedItem], on_step: OnStep
    ) -> Sequence[Result | PenstockError]:
        return []


class PromptPreparer:
    def prepare(self, inputs: Sequence[Input]) -> list[PreparedItem | BadInput]:
        given = [one for one in inputs if isinstance(one, GenerationInput)]
        return [
            PreparedPrompt(
                key="", length=8, ids=str(one.prompt).encode(), max_tokens=one.max_tokens, seed=1
            )
            for one in given
        ]


class Echo:
    """Generates one letter of its prompt per step."""

    device_name = "cpu"

    def __init__(self) -> None:
        self.inside: dict[int, PreparedPrompt] = {}
        self.written: dict[int, str] = {}
        self.most = 0

    def setup(self) -> None:
        pass

    def warmup(self) -> None:
        pass

    def admit(self, slot: int, item: PreparedItem) -> None:
        assert isinstance(item, PreparedPrompt)
        self.inside[slot], self.written[slot] = item, ""

    def step(self) -> StepEnd:
        self.most = max(self.most, len(self.inside))
        ended = StepEnd()
        for slot, item in list(self.inside.items()):
            text = item.ids.decode()[: len(self.written[slot]) + 1]
            self.written[slot] = text
            if len(text) == item.max_tokens:
                ended.results[slot] = GenerationResult(text, "length", 8, 4, len(text), 0)
                del self.inside[slot]
        return ended

    def take_chunks(self) -> dict[int, TokenChunk]:
        return {}

    def drop(self, slot: int) -> None:
        self.inside.pop(slot, None)


async def test_model_is_loaded_once_and_everything_is_acked() -> None:
    broker, model = InMemoryBroker(), Letters()
    async with running_worker(
        broker, MODEL, preparer=LetterPreparer(), model=lambda: model
    ) as worker:
        for text in ("one", "two"):
            [outcome] = await worker.compute(TextInput(text))
            assert outcome == EmbeddingResult(4 * text.encode(), 3)
    assert (model.loads, len(worker.rows)) == (1, 2)
    for subscription in (workers_subscription_id, batch_subscription_id):
        assert broker.backlog(subscription(MODEL.name)) == 0


async def test_model_that_computes_in_steps_has_its_items_join() -> None:
    model = Echo()
    async with running_worker(
        InMemoryBroker(), WRITER, preparer=PromptPreparer(), model=lambda: model
    ) as worker:
        inputs = [
            GenerationInput(prompt=word, max_tokens=4, seed=1) for word in ("abcdef", "uvwxyz")
        ]
        first, second = await worker.compute(*inputs)
    assert isinstance(first, GenerationResult)
    assert isinstance(second, GenerationResult)
    assert (first.text, second.text, model.most) == ("abcd", "uvwx", 2)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (Refused, ConfigurationError, "no weights"),
        (Broken, ModelFailed, "a bug of the model's"),
    ],
)
async def test_model_that_cannot_be_loaded_says_why(
    model: type[Letters], error: type[PenstockError], words: str
) -> None:
    opening = running_worker(InMemoryBroker(), MODEL, preparer=LetterPreparer(), model=model)
    with pytest.raises(error, match=words):
        await opening.__aenter__()


async def test_model_that_loses_results_fails_its_items() -> None:
    async with running_worker(
        InMemoryBroker(), MODEL, preparer=LetterPreparer(), model=Miscounting
    ) as worker:
        [outcome] = await worker.compute(TextInput("a"))
    assert isinstance(outcome, ModelFailed)


async def test_model_without_folder_needs_both_parts() -> None:
    opening = running_worker(InMemoryBroker(), MODEL, preparer=LetterPreparer())
    with pytest.raises(ValueError, match="folder"):
        await opening.__aenter__()


async def test_results_are_found_again_with_a_redis(redis_url: str) -> None:
    async with running_worker(
        InMemoryBroker(), MODEL, preparer=LetterPreparer(), model=Letters, redis_url=redis_url
    ) as worker:
        [outcome] = await worker.compute(TextInput("a"))
    assert isinstance(outcome, EmbeddingResult)


def test_example_passes_as_its_page_says() -> None:
    """Runs the docs page's command in a separate process."""
    page = (ROOT / "docs" / "how-to" / "test-your-model.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^\.venv/bin/pytest (.+)$", page, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *shlex.split(arguments),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^4 passed", done.stdout, re.MULTILINE)
