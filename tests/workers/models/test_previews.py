"""A real image model in a real process sends previews to watchers without changing the final
image.
"""

from collections.abc import Sequence

import pytest

from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import START_LIMIT_S
from workers.models.base import Prepared, Preparer
from workers.models.reports import Previews
from workers.runtime.pooled_process import PooledProcess

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


def asked(preparer: Preparer, steps: int, count: int = 2, side: int = 64) -> list[Prepared]:
    inputs = [
        ImageInput("a red circle", side, side, steps, 2.0, seed, "default") for seed in range(count)
    ]
    prepared = preparer.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in prepared)
    return list(prepared)  # type: ignore[arg-type]


async def drawn(
    process: PooledProcess, batch: Sequence[Prepared], watched: Sequence[int]
) -> tuple[list[bytes | None], list[Previews]]:
    """A batch's images, and its previews while these slots are watched."""
    seen: list[Previews] = []
    running = await process.send(
        batch,
        timeout_s=START_LIMIT_S,
        on_step=lambda step, steps: running.watch(watched) if watched else None,
        on_previews=seen.append,
    )
    done = await running.done
    running.watch(watched)  # it has finished, so this must not affect the next batch
    assert all(isinstance(result, ImageResult) for result in done.outcomes), done.outcomes
    return [result.image.data for result in done.results if isinstance(result, ImageResult)], seen


async def test_watched_places_are_shown_and_images_are_the_same(
    process: PooledProcess, tiny_preparer: Preparer
) -> None:
    batch = asked(tiny_preparer, 60)
    plain, none = await drawn(process, batch, [])
    watched, seen = await drawn(process, batch, [1])
    assert watched == plain
    assert none == []
    assert seen, "nothing was shown"
    for previews in seen:
        assert 0 < previews.step < previews.steps == 60
        assert list(previews.images) == [1]
        image = previews.images[1]
        assert (image.width, image.height) == (64, 64)
        assert len(image.pixels) == 64 * 64 * 3
        assert len(set(image.pixels)) > 16  # not one color


async def test_previews_of_large_images_are_small(
    process: PooledProcess, tiny_preparer: Preparer
) -> None:
    _, seen = await drawn(process, asked(tiny_preparer, 8, 1, 192), [0])
    assert {(one.images[0].width, one.images[0].height) for one in seen} == {(96, 96)}


async def test_who_stops_watching_is_shown_nothing_more(
    process: PooledProcess, tiny_preparer: Preparer
) -> None:
    """A Watch from an earlier batch does not apply to the next one."""
    _, seen = await drawn(process, asked(tiny_preparer, 60), [0, 1])
    assert seen
    _, seen = await drawn(process, asked(tiny_preparer, 60), [])
    assert seen == []
