"""The number of tokens per batch on devices with made-up costs. Nothing is timed."""

from collections.abc import Callable

import pytest

from shared.models.catalog import Model
from workers.autotune.batch_budget import BudgetTiming, find_budget
from workers.autotune.choice import Choice, Layout
from workers.models.backend import Backend
from workers.models.base import OutOfMemory

DEADLINE_S = 30.0


def device(
    call_s: float, tokens_per_s: float, fitting_tokens: int = 2**40, slow_from: int = 2**40
) -> Callable[[int], BudgetTiming]:
    """A device whose calls take a fixed amount of time plus an amount per token.

    Args:
        fitting_tokens: maximum number of tokens that fit in its memory.
        slow_from: from this number of tokens up, it computes half as many per second.
    """

    def measure(tokens: int) -> BudgetTiming:
        if tokens > fitting_tokens:
            raise OutOfMemory("the device is full")
        rate = tokens_per_s / (2 if tokens >= slow_from else 1)
        batch_s = call_s + tokens / rate
        return BudgetTiming(tokens=tokens, tokens_per_s=tokens / batch_s, batch_s=batch_s)

    return measure


@pytest.mark.parametrize(
    ("measure", "max_tokens", "budget"),
    [
        pytest.param(device(0.002, 10_000), 32_768, 2048, id="a CPU gains nothing"),
        pytest.param(device(0.0013, 9e6), 131_072, 131_072, id="MiniLM on an H200"),
        pytest.param(device(0.0013, 7e5), 32_768, 8192, id="a larger model fills it sooner"),
        pytest.param(device(0.0013, 9e6), 5000, 5000, id="the entry's bound"),
        pytest.param(device(0.0013, 9e6), 512, 512, id="a bound below the usual number"),
        pytest.param(device(0.0013, 9e6, slow_from=16_384), 32_768, 8192, id="a rate that falls"),
        pytest.param(device(0.5, 1e5), 131_072, 65_536, id="a batch that takes too long"),
        pytest.param(device(0.0, 500.0), 32_768, 512, id="even the usual one takes too long"),
        pytest.param(device(0.0, 1.0), 32_768, 256, id="and any other"),
        pytest.param(device(0.1, 9e6, 20_000), 131_072, 8192, id="room for two of a quarter"),
        pytest.param(device(0.1, 9e6, 3000), 131_072, 1024, id="no room for more than usual"),
        pytest.param(device(0.1, 9e6, 1000), 131_072, 512, id="no room for the usual one"),
    ],
)
def test_tokens_are_doubled_while_that_pays(
    measure: Callable[[int], BudgetTiming], max_tokens: int, budget: int
) -> None:
    tokens, timings = find_budget(measure, 2048, max_tokens, DEADLINE_S)
    assert tokens == budget
    assert len({timing.tokens for timing in timings}) == len(timings)


def test_a_slow_device_times_few_batches() -> None:
    _, timings = find_budget(device(0.0, 100.0), 2048, 32_768, DEADLINE_S)
    assert [timing.tokens for timing in timings] == [2048, 256]
    _, timings = find_budget(device(0.0, 500.0), 2048, 32_768, DEADLINE_S)
    assert [timing.tokens for timing in timings] == [2048, 512]


def test_what_did_not_fit_has_no_rate() -> None:
    _, timings = find_budget(device(0.1, 9e6, 3000), 2048, 32_768, DEADLINE_S)
    assert [(timing.tokens, timing.tokens_per_s > 0) for timing in timings] == [
        (2048, True),
        (4096, False),
    ]


def entry(**batch: int) -> Model:
    fields = {"name": "mini", "task": "embedding", "source": "local:x", "dimensions": 4}
    return Model.model_validate(fields | ({"batch": batch} if batch else {}))


@pytest.mark.parametrize(
    ("batch", "found", "limits"),
    [
        ({}, 0, (2048, 64)),
        ({}, 2048, (2048, 64)),
        ({}, 8192, (8192, 256)),
        ({}, 32_768, (32_768, 1024)),
        ({"max_tokens": 2048, "max_items": 64}, 0, (2048, 64)),
        ({"max_tokens": 2048}, 32_768, (2048, 64)),
        ({"max_tokens": 512}, 0, (512, 64)),
        ({"max_tokens": 4096, "max_items": 256}, 2048, (2048, 128)),
        ({"max_tokens": 8192, "max_items": 16}, 2048, (2048, 16)),
        ({"max_items": 8}, 32_768, (32_768, 8)),
    ],
)
def test_the_entrys_numbers_are_upper_bounds(
    batch: dict[str, int], found: int, limits: tuple[int, int]
) -> None:
    choice = Choice(backend=Backend(), layout=Layout(1, 1), reason="", batch_tokens=found)
    served = choice.batch(entry(**batch))
    assert (served.max_tokens, served.max_items) == limits


def test_an_instance_admits_enough_to_fill_batches() -> None:
    assert entry().max_in_flight == 4 * 1024
    assert entry(max_tokens=2048, max_items=64).max_in_flight == 512
    assert entry(max_items=300).max_in_flight == 1200
