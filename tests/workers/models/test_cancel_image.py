"""A real image model in a real process: a batch that no caller wants any longer stops after its
current step.
"""

import asyncio

import pytest

from shared.errors import Canceled
from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import START_LIMIT_S
from workers.models.base import Prepared, Preparer
from workers.runtime.pooled_process import PooledProcess

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


def asked(preparer: Preparer, steps: int, count: int = 1) -> list[Prepared]:
    inputs = [ImageInput("a cat", 64, 64, steps, 7.5, seed, "default") for seed in range(count)]
    prepared = preparer.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in prepared)
    return list(prepared)  # type: ignore[arg-type]


@pytest.mark.parametrize("images", [1, 2])
async def test_image_canceled_at_step_3_stops_within_one_step(
    process: PooledProcess, tiny_preparer: Preparer, images: int
) -> None:
    told: list[tuple[int, int]] = []

    def on_step(step: int, steps: int) -> None:
        told.append((step, steps))
        if step >= 3:
            running.cancel()

    batch = asked(tiny_preparer, 100, images)
    running = await process.send(batch, timeout_s=START_LIMIT_S, on_step=on_step)
    done = await running.done
    assert all(isinstance(result, Canceled) for result in done.outcomes)
    assert len(done.results) == images
    canceled_at = next(step for step, _ in told if step >= 3)
    assert told[0][1] == 100
    assert done.steps_saved is not None
    # The next steps may run while the Cancel message is in transit; each takes a few milliseconds.
    assert 0 < done.steps_saved < 100 - canceled_at
    running.cancel()  # it has finished, so this is harmless
    after = await asyncio.wait_for(
        process.run(asked(tiny_preparer, 2), timeout_s=START_LIMIT_S), START_LIMIT_S
    )
    assert isinstance(after.results[0], ImageResult)
