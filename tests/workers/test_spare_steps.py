"""The spare time that a model process reports, with a model whose steps take known times."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.models.catalog import Model
from shared.models.entry import Batch, Generation
from shared.models.tasks.text import GenerationResult, TokenChunk
from workers.models.base import PreparedItem, PreparedPrompt, StepEnd
from workers.models.reports import BatchResult, ItemEnded, Spare
from workers.models.step_shares import StepRoom
from workers.runtime.execution import StepExecution
from workers.runtime.protocol import HEADER, RunBatch, ServerMessage, decode_server_message
from workers.runtime.resident_models import ResidentModels

SLOTS, BUDGET = 8, 800
MODEL = Model(
    name="timed",
    task="text",
    source="local:nowhere",
    batch=Batch(max_tokens=BUDGET, max_items=SLOTS),
    generation=Generation(context_tokens=BUDGET, default_tokens=4, longest_tokens=300),
)
FIXED_S, EACH_S = 0.020, 0.002
FULL_S = FIXED_S + SLOTS * EACH_S


class TimedModel:
    """A model whose steps take FIXED_S, plus EACH_S for each text, on a simulated clock."""

    device_name = "clock"

    def __init__(self) -> None:
        self.now_s = 0.0
        self._left: dict[int, int] = {}
        self._waits: dict[int, int] = {}
        """How many steps each text waits before its first one."""

    def clock(self) -> float:
        return self.now_s

    def setup(self) -> None:
        """Does nothing, because there are no weights to load."""

    def warmup(self) -> None:
        """Does nothing, because there is nothing to compile."""

    def admit(self, slot: int, item: PreparedItem) -> None:
        assert isinstance(item, PreparedPrompt)
        self._left[slot] = item.max_tokens
        self._waits[slot] = item.top_k

    def step(self) -> StepEnd:
        computed = [slot for slot in self._left if not self._waits[slot]]
        self.now_s += FIXED_S + EACH_S * len(computed)
        end = StepEnd(work=len(computed))
        for slot in self._left.keys() - computed:
            self._waits[slot] -= 1
            end.waiting.append(slot)
        for slot in computed:
            self._left[slot] -= 1
            if not self._left[slot]:
                del self._left[slot]
                end.results[slot] = GenerationResult("", "length", 1, 0, 1)
        return end

    def take_chunks(self) -> dict[int, TokenChunk]:
        return {}

    def drop(self, slot: int) -> None:
        del self._left[slot]


def text(steps: int, room: int = BUDGET // SLOTS, waits: int = 0) -> PreparedPrompt:
    return PreparedPrompt(key="", length=room, ids=b"", max_tokens=steps, seed=0, top_k=waits)


class Process:
    """A model process that has already run every possible number of texts."""

    def __init__(self, folder: Path, model: TimedModel | None = None) -> None:
        self._model = model or TimedModel()
        self._room = StepRoom(MODEL)
        self._resident = ResidentModels([lambda: self._model], [folder], loaded={0: self._model})
        self._resident.open()
        self.run(*[text(10 * number) for number in range(1, SLOTS + 1)])

    def run(self, *texts: PreparedPrompt) -> list[ServerMessage]:
        caller, process = socket.socketpair()
        with caller, process:
            batch = RunBatch(1, list(texts))
            StepExecution(process, self._resident, batch, self._room, self._model.clock).run()
            process.shutdown(socket.SHUT_WR)
            with caller.makefile("rb") as told:
                found = []
                while head := told.read(HEADER.size):
                    found.append(decode_server_message(told.read(HEADER.unpack(head)[0])))
        return found


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def ends(messages: list[ServerMessage]) -> list[BatchResult]:
    return [message.done for message in messages if isinstance(message, ItemEnded)]


def seconds(done: BatchResult) -> float:
    return done.inference_ms / 1000 / done.batch_items


def told(messages: list[ServerMessage]) -> list[float]:
    return [message.seconds for message in messages if isinstance(message, Spare)]


@pytest.mark.parametrize("company", [1, 2, 4, SLOTS])
def test_a_text_takes_as_much_alone_as_in_company(process: Process, company: int) -> None:
    messages = process.run(*[text(200)] * company)
    for done in ends(messages):
        assert seconds(done) == pytest.approx(200 * (FIXED_S / company + EACH_S))
        taken = seconds(done) - done.spare_s
        assert taken == pytest.approx(200 * FULL_S / SLOTS, rel=0.02)


def test_nobody_pays_for_steps_in_which_it_waits(process: Process) -> None:
    """For example, an image waits while its adapter is loaded.

    The others in the batch pay for the whole step.
    """
    done = ends(process.run(text(50), text(20, waits=100)))
    first, waited = sorted(done, key=lambda one: one.finished_at_s)
    assert seconds(first) == pytest.approx(50 * (FIXED_S + EACH_S))
    assert seconds(waited) == pytest.approx(20 * (FIXED_S + EACH_S))


def test_all_that_is_spare_is_told_while_it_runs_and_with_the_ends(process: Process) -> None:
    messages = process.run(text(300), text(40), text(100))
    assert sum(told(messages)) == pytest.approx(sum(done.spare_s for done in ends(messages)))
    assert len(told(messages)) > 6, "a long text is not only told of at its end"
    assert isinstance(messages[-2], ItemEnded), "it is told before the item that ends the batch"


def test_full_workers_have_nothing_to_spare(process: Process) -> None:
    assert told(process.run(*[text(50)] * SLOTS)) == []
    # Slots are free, but nothing can join because the room is reserved.
    assert told(process.run(text(50, room=BUDGET))) == []
    assert told(process.run(*[text(50, room=BUDGET // 2)] * 2)) == []
