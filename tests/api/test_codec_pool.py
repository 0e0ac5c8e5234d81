"""The image process pool, seen from the outside: bounded, ordered, and without wasted work.

Nothing here depends on elapsed time: signals suspend and resume the processes.
"""

import asyncio
import io
import struct
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from PIL import Image
from prometheus_client import REGISTRY

from api.inputs import codec_pool
from api.inputs.codec_pool import SPARE_PROCESSES
from api.inputs.codec_server import NICENESS
from tests.api.harness import IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.hostile_jpeg import repeat_scans
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.metrics import metric

pytestmark = pytest.mark.anyio
WAITING = "penstock_api_pictures_waiting"
LAST_NICENESS = 19
"""Linux's highest niceness."""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    """An API with a single image process, which has already processed an image."""
    async with running_api(settings_for(tmp_path, picture_processes=1)) as running:
        assert not _processes()
        assert (await _edit(running, "first")).status_code == 200
        yield running
        for process in _processes():
            process.resume()
        await running.until_idle()
    assert not _processes()


def _png(size: tuple[int, int] = (64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).save(buffer, "png")
    return buffer.getvalue()


PNG = _png()


async def _edit(api: ApiUnderTest, prompt: str, **headers: str) -> httpx.Response:
    fields = {"prompt": prompt, "seed": "7", "model": IMAGE_MODEL.name}
    return await api.http.post(
        "/v1/images/edits", files={"image": PNG}, data=fields, headers=headers, timeout=WAIT_LIMIT_S
    )


def _processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "api.inputs.codec_server" in child.cmdline():
                found.append(child)
    return found


def _ends(end: str) -> float:
    return REGISTRY.get_sample_value("penstock_api_pictures_total", {"end": end}) or 0.0


async def _until(is_so: object) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not is_so():  # type: ignore[operator]  # noqa: ASYNC110 - the product has no use for an event here
            await asyncio.sleep(0.005)


async def _stopped(api: ApiUnderTest) -> tuple[psutil.Process, "asyncio.Task[httpx.Response]"]:
    """A suspended image process that holds an image, and the request the image came from."""
    (process,) = _processes()
    process.suspend()
    sent = asyncio.create_task(_edit(api, "in hand"))
    pool = api.dependencies.image_codec._pool
    await _until(lambda: pool._free == SPARE_PROCESSES)
    return process, sent


async def _in_line(
    api: ApiUnderTest, prompt: str, **headers: str
) -> "asyncio.Task[httpx.Response]":
    """A request whose image is waiting for its turn."""
    before = metric(WAITING)
    sent = asyncio.create_task(_edit(api, prompt, **headers))
    await _until(lambda: metric(WAITING) == before + 1 or sent.done())
    return sent


def _prompts(api: ApiUnderTest) -> list[str]:
    return [item.input.prompt for item in api.worker.items]  # type: ignore[union-attr, misc]


def _run_until_its_next_read(process: psutil.Process) -> None:
    process.resume()
    while process.status() == psutil.STATUS_RUNNING:
        time.sleep(0.001)
    process.suspend()


async def _next_prompt(api: ApiUnderTest, process: psutil.Process) -> str:
    """Lets a suspended process finish one image, and returns its prompt once the worker has it.

    After decoding, images may overtake each other on their way to the worker. So the process runs
    only while the API's event loop is blocked, which keeps it from getting past its next read.
    """
    decoded, received = _ends("done"), len(_prompts(api))
    async with asyncio.timeout(WAIT_LIMIT_S):
        while _ends("done") == decoded:
            _run_until_its_next_read(process)
            await asyncio.sleep(0.005)
    await _until(lambda: len(_prompts(api)) > received)
    return _prompts(api)[received]


async def test_images_take_turns_in_order(api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    others = [await _in_line(api, f"number {number}") for number in range(5)]
    assert _processes() == [process]
    prompts = [await _next_prompt(api, process) for _ in (first, *others)]
    assert prompts == ["in hand", *(f"number {number}" for number in range(5))]
    assert {response.status_code for response in await asyncio.gather(first, *others)} == {200}


async def test_deadline_that_passes_while_decoding_ends_it(api: ApiUnderTest) -> None:
    (process,) = _processes()
    process.suspend()
    response = await _edit(api, "late", **{"x-penstock-deadline-ms": "1000"})
    assert response.status_code == 504
    assert (
        response.json()["error"]["message"]
        == "deadline exceeded: the image was still being decoded"
    )
    await _until(lambda: not process.is_running())
    assert (await _edit(api, "next")).status_code == 200
    assert _prompts(api) == ["first", "next"]


async def test_deadline_that_passes_while_waiting_is_told(api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    response = await _edit(api, "late", **{"x-penstock-deadline-ms": "1000"})
    assert response.status_code == 504
    assert (
        response.json()["error"]["message"]
        == "deadline exceeded: the image was still waiting to be decoded"
    )
    process.resume()
    assert (await first).status_code == 200
    assert _prompts(api) == ["first", "in hand"]


async def test_image_of_a_caller_that_hung_up_is_not_begun(api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    gone, abandoned = await _in_line(api, "gone"), _ends("abandoned_waiting")
    gone.cancel()
    await _until(lambda: _ends("abandoned_waiting") == abandoned + 1)
    assert not metric(WAITING)
    process.resume()
    assert (await first).status_code == 200
    assert _prompts(api) == ["first", "in hand"]


async def test_image_of_a_caller_that_hung_up_is_decoded_no_further(api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    following = await _in_line(api, "next")
    first.cancel()
    await _until(lambda: not process.is_running())
    assert (await following).status_code == 200
    assert _prompts(api) == ["first", "next"]


@pytest.fixture
def short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits set before the API starts."""
    monkeypatch.setattr(codec_pool, "MAX_QUEUED", 3)


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_pool, "MAX_QUEUED_BYTES", len(PNG) * 2)


async def test_line_is_bounded(short_line: None, api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    others = [await _in_line(api, f"number {number}") for number in range(3)]
    refused = await _edit(api, "too many")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "3 of your images are waiting to be decoded" in refused.json()["error"]["message"]
    process.resume()
    assert {response.status_code for response in await asyncio.gather(first, *others)} == {200}


async def test_bytes_in_line_are_bounded(few_bytes: None, api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    others = [await _in_line(api, f"number {number}") for number in range(2)]
    assert (await _edit(api, "too many")).status_code == 429
    process.resume()
    assert {response.status_code for response in await asyncio.gather(first, *others)} == {200}


async def test_image_that_would_be_late_is_refused_at_once(api: ApiUnderTest) -> None:
    process, first = await _stopped(api)
    other = await _in_line(api, "waits")
    refused = await _edit(api, "too late", **{"x-penstock-deadline-ms": "60"})
    assert refused.status_code == 429
    assert "after its deadline" in refused.json()["error"]["message"]
    process.resume()
    assert {response.status_code for response in await asyncio.gather(first, other)} == {200}


async def test_image_whose_process_died_is_told_and_the_next_gets_another(
    api: ApiUnderTest,
) -> None:
    process, first = await _stopped(api)
    process.kill()
    assert (await first).status_code == 503
    assert (await _edit(api, "next")).status_code == 200


async def test_image_of_a_caller_has_a_few_seconds_of_cpu_time(api: ApiUnderTest) -> None:
    (process,) = _processes()
    soft_s, _ = process.rlimit(psutil.RLIMIT_CPU)
    times = process.cpu_times()
    assert soft_s <= times.user + times.system + 7, "6 s, rounded up"


async def test_many_scans_are_the_callers_error(api: ApiUnderTest) -> None:
    fields = {"prompt": "a", "model": IMAGE_MODEL.name}
    files = {"image": repeat_scans(4000, 1000)}
    answer = await api.http.post("/v1/images/edits", files=files, data=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "image")
    assert "JPEGs with more than 100 scans" in error["message"]
    assert _processes(), "it lives on"


async def test_image_has_no_more_memory_than_its_header_declares(api: ApiUnderTest) -> None:
    """Both the `ispe` box of an AVIF image and its AV1 frame specify its size."""
    buffer = io.BytesIO()
    Image.new("RGB", (8000, 8000), "navy").save(buffer, "AVIF", speed=10)
    frame = buffer.getvalue()
    at = frame.index(b"ispe") + 8
    lying = frame[:at] + struct.pack(">II", 64, 64) + frame[at + 8 :]
    fields = {"prompt": "a", "model": IMAGE_MODEL.name}
    answer = await api.http.post("/v1/images/edits", files={"image": lying}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image"), answer.text
    assert (await _edit(api, "next")).status_code == 200


async def test_processes_have_no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_SECRET", "hush")
    async with running_api(settings_for(tmp_path)) as api:
        assert (await _edit(api, "first")).status_code == 200
        (process,) = _processes()
        assert "PENSTOCK_SECRET" not in process.environ()
        assert process.nice() == min(psutil.Process().nice() + NICENESS, LAST_NICENESS)


async def test_prediction_waits_for_its_image_until_its_deadline(api: ApiUnderTest) -> None:
    file = (await api.http.post("/v1/files", files={"content": ("a.png", PNG, "image/png")})).json()
    (process,) = _processes()
    process.suspend()
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "late", "image": file["urls"]["get"]}}
    response = await api.http.post(
        "/v1/predictions", json=body, headers={"x-penstock-deadline-ms": "1000"}
    )
    assert response.status_code == 504
    assert response.json()["detail"] == "deadline exceeded: the image was still being decoded"


async def test_no_tenant_has_all_processes(short_line: None, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, b="busy", q="quiet")
    async with running_api(settings_for(tmp_path, picture_processes=1, keys_url=keys)) as api:
        busy, quiet = bearer("b"), bearer("q")
        assert (await _edit(api, "first", **busy)).status_code == 200
        (process,) = _processes()
        process.suspend()
        sent = [asyncio.create_task(_edit(api, "in hand", **busy))]
        await _until(lambda: api.dependencies.image_codec._pool._running["busy"] == 1)
        sent += [await _in_line(api, f"busy {number}", **busy) for number in range(3)]
        assert (await _edit(api, "too many", **busy)).status_code == 429
        assert (await _edit(api, "quiet", **quiet)).status_code == 200, "it has one of its own"
        assert _prompts(api) == ["first", "quiet"]
        process.resume()
        assert {response.status_code for response in await asyncio.gather(*sent)} == {200}
        await api.until_idle()


async def test_tenants_take_turns(tmp_path: Path) -> None:
    keys = keys_url(tmp_path, b="busy", o="other", q="quiet")
    async with running_api(settings_for(tmp_path, picture_processes=1, keys_url=keys)) as api:
        busy, other, quiet = bearer("b"), bearer("o"), bearer("q")
        assert (await _edit(api, "first", **busy)).status_code == 200
        process, first = await _held(api, busy)
        assert (await _edit(api, "first", **other)).status_code == 200
        _, second = await _held(api, other)
        sent = [first, second]
        sent += [await _in_line(api, f"busy {number}", **busy) for number in range(3)]
        sent.append(await _in_line(api, "quiet", **quiet))
        prompts = [await _next_prompt(api, process) for _ in range(3)]
        assert prompts == ["in hand", "busy 0", "quiet"]
        for process in _processes():
            process.resume()
        assert {response.status_code for response in await asyncio.gather(*sent)} == {200}
        assert not api.dependencies.image_codec._pool._running
        await api.until_idle()


async def _held(
    api: ApiUnderTest, key: dict[str, str]
) -> tuple[psutil.Process, "asyncio.Task[httpx.Response]"]:
    """A suspended image process, and the request from the tenant whose image it holds."""
    pool, before = api.dependencies.image_codec._pool, set(_processes())
    (idle,) = (one for one in before if one.status() != psutil.STATUS_STOPPED)
    idle.suspend()
    free = pool._free
    sent = asyncio.create_task(_edit(api, "in hand", **key))
    await _until(lambda: pool._free == free - 1)
    return idle, sent
