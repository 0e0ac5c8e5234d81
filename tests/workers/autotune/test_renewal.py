"""What becomes of choices in doubt: scripted batches, and measurements the test ends itself."""

import asyncio
from dataclasses import dataclass, field

import pytest

from shared.errors import ModelFailed
from tests.limits import WAIT_LIMIT_S
from workers.autotune.choice import Choice, Layout
from workers.autotune.renewal import (
    FAR,
    FEWEST_TOKENS,
    WINDOW_CPU_S,
    WINDOWS,
    CostMonitor,
    Renewal,
    TunedModel,
)
from workers.models.backend import Backend

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

EXPECTED_S = 0.001


@dataclass
class RanBatch:
    """A batch as a model process tells of it."""

    padded_work: int
    cpu_s: float


def window(times_expected: float) -> list[RanBatch]:
    """Batches of a whole window that cost so many times what was expected."""
    tokens = 1000
    cpu_s = tokens * EXPECTED_S * times_expected
    return [RanBatch(tokens, cpu_s)] * (int(WINDOW_CPU_S / cpu_s) + 1)


@pytest.mark.parametrize(
    ("windows", "is_contradicted"),
    [
        ([1.0] * 9, False),
        ([1.1 * FAR] * WINDOWS, True),
        ([0.9 / FAR] * WINDOWS, True),
        ([1.1 * FAR] * (WINDOWS - 1), False),
        ([1.1 * FAR, 1.1 * FAR, 1.0, 1.1 * FAR, 1.1 * FAR], False),
    ],
)
def test_only_windows_in_a_row_contradict(windows: list[float], is_contradicted: bool) -> None:
    watch = CostMonitor(EXPECTED_S)
    for times in windows:
        for batch in window(times):
            watch.ran(batch)
    assert watch.is_contradicted == is_contradicted


def test_small_batches_and_unknown_expectations_say_nothing() -> None:
    for watch, tokens in ((CostMonitor(EXPECTED_S), FEWEST_TOKENS - 1), (CostMonitor(0.0), 1000)):
        for _ in range(1000):
            watch.ran(RanBatch(tokens, 1.0))
        assert not watch.is_contradicted


def choice(*, is_provisional: bool) -> Choice:
    return Choice(
        backend=Backend(),
        layout=Layout(2, 1),
        reason="",
        is_provisional=is_provisional,
        cpu_s_per_token=0.0 if is_provisional else EXPECTED_S,
    )


@dataclass
class Measurements:
    """Stands in for the choosing process: told when to end, and what of."""

    begun: asyncio.Queue[asyncio.Future[Choice]] = field(default_factory=asyncio.Queue)
    doubted: asyncio.Event = field(default_factory=asyncio.Event)

    async def measure(self) -> Choice:
        end: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        self.begun.put_nowait(end)
        return await end

    async def mark_provisional(self) -> None:
        self.doubted.set()

    def tuned_model(self, *, is_provisional: bool) -> TunedModel:
        return TunedModel(
            "a model", choice(is_provisional=is_provisional), self.mark_provisional, self.measure
        )


async def test_a_provisional_choice_is_measured_once_the_worker_is_idle() -> None:
    made = Measurements()
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        Renewal([made.tuned_model(is_provisional=True)], idle_s=0.0),
    ):
        (await made.begun.get()).set_result(choice(is_provisional=True))
        await asyncio.sleep(0)
        assert made.begun.empty()  # once, even where it is provisional still
    assert not made.doubted.is_set()


async def test_work_goes_before_measuring() -> None:
    made = Measurements()
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        Renewal([None, made.tuned_model(is_provisional=True)], idle_s=0.0) as renewal,
    ):
        first = await made.begun.get()
        renewal.ran(0, RanBatch(10, 0.1))
        second = await made.begun.get()
        assert first.cancelled()
        second.set_result(choice(is_provisional=False))


async def test_a_choice_that_batches_contradict_is_doubted_and_measured() -> None:
    made = Measurements()
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        Renewal([made.tuned_model(is_provisional=False)], idle_s=0.0) as renewal,
    ):
        for batch in window(2 * FAR) * WINDOWS:
            renewal.ran(0, batch)
        await made.doubted.wait()
        (await made.begun.get()).set_result(choice(is_provisional=False))


async def test_what_fits_is_left_alone() -> None:
    made = Measurements()
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        Renewal([made.tuned_model(is_provisional=False)], idle_s=0.0) as renewal,
    ):
        for batch in window(1.0) * 2 * WINDOWS:
            renewal.ran(0, batch)
        await asyncio.sleep(0)
        assert not made.doubted.is_set()
        assert made.begun.empty()


@pytest.mark.parametrize("error", [ModelFailed("broken"), OSError("no space left on device")])
async def test_a_measurement_that_fails_ends_the_matter_and_no_other(error: Exception) -> None:
    broken, whole = Measurements(), Measurements()
    both = [broken.tuned_model(is_provisional=True), whole.tuned_model(is_provisional=True)]
    async with asyncio.timeout(WAIT_LIMIT_S), Renewal(both, idle_s=0.0) as renewal:
        (await broken.begun.get()).set_exception(error)
        (await whole.begun.get()).set_result(choice(is_provisional=False))
        for batch in window(2 * FAR) * WINDOWS:
            renewal.ran(0, batch)
        await asyncio.sleep(0)
        assert broken.begun.empty()  # nor is it doubted again
    assert not broken.doubted.is_set()


async def test_a_doubt_that_cannot_be_kept_is_no_end_of_the_others() -> None:
    made, other = Measurements(), Measurements()

    async def fail() -> None:
        raise OSError("no space left on device")

    unkept = TunedModel("a model", choice(is_provisional=False), fail, made.measure)
    held = [unkept, other.tuned_model(is_provisional=False)]
    async with asyncio.timeout(WAIT_LIMIT_S), Renewal(held, idle_s=0.0) as renewal:
        for number in (0, 1):
            for batch in window(2 * FAR) * WINDOWS:
                renewal.ran(number, batch)
        (await other.begun.get()).set_result(choice(is_provisional=False))
    assert made.begun.empty()


async def test_a_worker_leaves_while_a_measurement_ends() -> None:
    """It was stopped for work that came, and its processes take their time to go."""
    begun, ending = asyncio.Event(), asyncio.Event()

    async def measure() -> Choice:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.Event().wait()
        raise AssertionError("nothing ends it but a cancellation")

    held = TunedModel(
        "a model", choice(is_provisional=True), Measurements().mark_provisional, measure
    )
    async with asyncio.timeout(WAIT_LIMIT_S), Renewal([held], idle_s=0.0) as renewal:
        await begun.wait()
        renewal.ran(0, RanBatch(10, 0.1))
        await ending.wait()


async def test_idle_means_that_no_batch_ran_for_a_while() -> None:
    now_s, slept = [100.0], asyncio.Event()

    def clock() -> float:
        slept.set()
        return now_s[0]

    made = Measurements()
    async with (
        asyncio.timeout(WAIT_LIMIT_S),
        Renewal([made.tuned_model(is_provisional=True)], idle_s=0.01, clock=clock) as renewal,
    ):
        slept.clear()
        await slept.wait()
        assert made.begun.empty()
        renewal.ran(0, RanBatch(10, 0.1))
        now_s[0] += 1.0
        (await made.begun.get()).set_result(choice(is_provisional=False))
