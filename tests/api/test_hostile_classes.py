"""Misbehaving classes: their callers get a clear error, and other classes are still served."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from tests.api.serving_classes import predict, serve_class
from tests.workers.models.custom.hostile import ENDINGS, ENDLESS, RESOURCES, hostile_class

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=60)]
SOON = {"x-penstock-deadline-ms": "3000"}


async def test_each_ends_alone_in_a_clear_error(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "outside").mkdir()
    body = hostile_class([str(tmp_path / "outside")])
    found, others = {}, []
    async with AsyncExitStack() as opened:
        api = await serve_class(opened, tmp_path, redis_url, body, resources=RESOURCES)
        for mode in ENDINGS:
            found[mode] = await predict(api, mode=mode)
            others.append((await predict(api, mode="behave"))["output"])
        for mode in ENDLESS:
            found[mode] = await predict(api, SOON, mode=mode)
            others.append((await predict(api, mode="behave"))["output"])
        rows = list(api.rows)
    ends = {mode: _end_of(one, ENDINGS[mode]) for mode, one in found.items() if mode in ENDINGS}
    assert ends == ENDINGS
    assert {mode: found[mode]["status"] for mode in ENDLESS} == dict.fromkeys(ENDLESS, "failed")
    assert all("deadline" in found[mode]["error"] for mode in ENDLESS)
    assert others == ["well"] * len(found)
    assert len(rows) == 2 * len(found), "one row for each, and no prediction was computed twice"
    assert len(found["print_much"]["logs"]) < 40_000
    assert found["print_much"]["logs"].endswith("the end\n")
    assert "written-by-a-class" not in {name for _, _, names in os.walk(tmp_path) for name in names}


def _end_of(prediction: dict[str, Any], expected: tuple[str, object]) -> tuple[str, object]:
    """The status, with the output or with the part of the error that ENDINGS expects."""
    status = prediction["status"]
    if status == "succeeded":
        return status, prediction["output"]
    error, begin = prediction["error"] or "", expected[1]
    return status, begin if isinstance(begin, str) and error.startswith(begin) else error


async def test_what_a_class_left_behind_ends_with_it(tmp_path: Path, redis_url: str) -> None:
    async with AsyncExitStack() as opened:
        api = await serve_class(opened, tmp_path, redis_url, hostile_class([]))
        left = (await predict(api, mode="leave_children"))["output"]
        assert len(left) == 4, "the class and those that left it"
        assert [pid for pid in left if _runs(pid)] == left
        await predict(api, mode="leave")
        assert (await predict(api, mode="behave"))["output"] == "well"
        assert not [pid for pid in left if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


BREAKS_LATER = """
class Predictor(BasePredictor):
    def setup(self) -> None:
        if os.path.exists(MARK):
            raise RuntimeError("the weights are gone")

    def predict(self, mode: str) -> str:
        if mode == "break":
            open(MARK, "w").close()
            os._exit(3)
        return mode
"""


async def test_a_setup_that_fails_later_fails_what_waits_until_it_works(
    tmp_path: Path, redis_url: str
) -> None:
    mark = f"/dev/shm/penstock-test-{uuid4().hex}"
    body = f"MARK = {mark!r}\n{BREAKS_LATER}"
    async with AsyncExitStack() as opened:
        api = await serve_class(opened, tmp_path, redis_url, body)
        assert (await predict(api, mode="a"))["output"] == "a"
        assert "status 3" in (await predict(api, mode="break"))["error"]
        found = await predict(api, mode="b")
        assert "could not be set up again" in found["error"]
        assert "the weights are gone" in found["error"]
        os.unlink(mark)
        assert (await predict(api, mode="c"))["output"] == "c"


ASYNCHRONOUS = """
class Runner(BaseRunner):
    @concurrent(max=4)
    async def run(self, mode: str) -> str:
        if mode == "leave":
            await asyncio.sleep(0.3)  # others are in by then
            os._exit(5)
        await asyncio.sleep(0.5)
        return mode
"""


async def test_of_several_at_a_time_the_one_that_ends_the_process_fails_alone(
    tmp_path: Path, redis_url: str
) -> None:
    async with AsyncExitStack() as opened:
        api = await serve_class(opened, tmp_path, redis_url, ASYNCHRONOUS, batch={"max_items": 4})
        modes = ["a", "leave", "b", "c", "d", "e"]
        found = await asyncio.gather(*(predict(api, mode=mode) for mode in modes))
    ends = {mode: one["output"] or one["error"] for mode, one in zip(modes, found, strict=True)}
    failed = ends.pop("leave")
    assert failed == "the model process exited with status 5 while processing this item"
    assert ends == {mode: mode for mode in ends}
