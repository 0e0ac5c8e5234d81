"""Custom models behind the API, with a real worker and the class's process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client
from replicate.helpers import FileOutput, transform_output

from tests.api.harness import ApiUnderTest
from tests.api.predicting import WAIT, until_over
from tests.api.serving_classes import predict
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=30)]

CLASS = """
class Predictor(BasePredictor):
    def predict(
        self,
        text: str = Input(description="What is said.", min_length=1, max_length=20),
        times: int = Input(default=2, ge=1, le=5),
        mode: str = Input(default="say", choices=["say", "fail", "loop", "exit"]),
        image: Path | None = Input(default=None, description="Its size is said."),
        password: Secret | None = Input(default=None),
    ) -> Iterator[str]:
        print(f"asked for {text}")
        if mode == "fail":
            raise ValueError("it does not want to")
        if mode == "exit":
            os._exit(4)
        while mode == "loop":
            time.sleep(0.01)
        if image is not None:
            yield f"{image.suffix} of {image.stat().st_size} bytes"
        if password is not None:
            yield f"{len(password.get_secret_value())} secret letters"
        for number in range(times):
            yield f"{text} {number}"
"""
FILES = """
class Predictor(BasePredictor):
    def predict(self, size: int, kind: str = "bin") -> list[Path]:
        found = []
        for number in range(2):
            path = Path(f"{number}.{kind}").absolute()
            path = Path(os.environ["TMPDIR"]) / path.name
            path.write_bytes(bytes([number]) * size)
            found.append(path)
        return found
"""

TALKS_ON = """
class Predictor(BasePredictor):
    def predict(self, text: str) -> ConcatenateIterator[str]:
        yield "piece"
        while True:
            time.sleep(0.01)
"""
TALK = {"version": "mine", "input": {"text": "a"}}


async def test_a_class_is_served_with_its_logs_metrics_row_and_price(serve: Any) -> None:
    api = await serve(CLASS)
    found = await predict(api, text="hello")
    assert (found["status"], found["error"]) == ("succeeded", None)
    assert found["output"] == ["hello 0", "hello 1"]
    assert found["logs"] == "asked for hello\n"
    assert found["metrics"]["cost_usd"] == 0.25
    assert found["metrics"]["predict_time"] > 0
    (row,) = api.rows
    assert (row.task, row.status, row.cost_usd, row.list_price_usd) == (
        "custom",
        "succeeded",
        0.25,
        0.25,
    )


async def test_errors_of_a_class_end_its_predictions_alone(serve: Any) -> None:
    api = await serve(CLASS)
    failed = await predict(api, text="a", mode="fail")
    assert (failed["status"], failed["error"]) == ("failed", "ValueError: it does not want to")
    assert failed["logs"].startswith("asked for a\nTraceback")
    assert "ValueError: it does not want to" in failed["logs"]
    ended = await predict(api, text="a", mode="exit")
    assert ended["error"] == "the model process exited with status 4 while processing this item"
    assert (await predict(api, text="b", times=1))["output"] == ["b 0"]
    assert [row.cost_usd for row in api.rows] == [0.0, 0.0, 0.25]


INVALID = """
class InvalidInput(ValueError):
    pass

class Predictor(BasePredictor):
    def predict(self, image: Path, how: str) -> str:
        if how == "whole":
            raise InvalidInput("there is nothing to see")
        if how == "field":
            error = InvalidInput("is too dark")
            error.field = "image"
            raise error
        return open(str(image) + ".txt").read()
"""


async def test_an_input_that_the_class_calls_invalid_is_no_failure_of_the_service(
    serve: Any,
) -> None:
    api = await serve(INVALID)
    image = "data:image/png;base64,AAAA"
    whole = await predict(api, image=image, how="whole")
    named = await predict(api, image=image, how="field")
    failed = await predict(api, image=image, how="")
    assert (whole["status"], whole["error"], whole["logs"]) == (
        "failed",
        "there is nothing to see",
        "",
    )
    assert named["error"] == "image: is too dark"
    assert (
        failed["error"] == "FileNotFoundError: [Errno 2] No such file or directory: 'file.png.txt'"
    )
    assert "/" not in failed["logs"], "no path of the worker"
    assert [row.error_code for row in api.rows] == ["invalid_input"] * 2 + ["model_failed"]
    assert [row.cost_usd for row in api.rows] == [0.0] * 3


KILLED = """
print("imported from", __file__)

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        os.kill(os.getpid(), 9)
"""


async def test_a_caller_never_reads_what_a_process_printed_before_it_died(serve: Any) -> None:
    """The previous output may belong to another tenant and contain the machine's paths."""
    api = await serve(KILLED)
    killed = await predict(api, text="a")
    assert (killed["status"], killed["logs"]) == ("failed", "")
    assert "model processes died while processing this item" in killed["error"]
    for secret in ("imported", "predict.py", "/"):
        assert secret not in killed["error"], killed["error"]


TOGETHER = """
inside = set()

class Predictor(BasePredictor):
    @cog.concurrent(max=4)
    async def predict(self, number: int) -> int:
        inside.add(number)
        while len(inside) < 4:
            await asyncio.sleep(0.01)
        return number
"""


async def test_as_many_are_computed_at_a_time_as_the_class_allows(serve: Any) -> None:
    """Each prediction waits for the others, so none finishes unless they all run at once."""
    api = await serve(TOGETHER)
    limit = {"cancel-after": f"{WAIT_LIMIT_S:g}s"}
    found = await asyncio.gather(*(predict(api, limit, number=number) for number in range(4)))
    assert [one["output"] for one in found] == [0, 1, 2, 3]


LOOP = {"version": "mine", "input": {"text": "a", "mode": "loop"}}


async def test_a_loop_ends_at_its_deadline(serve: Any) -> None:
    api = await serve(CLASS)
    assert (await predict(api, text="b", times=1))["output"] == ["b 0"]  # it is set up
    late = await api.http.post("/v1/predictions", json=LOOP, headers=WAIT | {"cancel-after": "5s"})
    found = await until_over(api, late.json())
    assert "deadline" in found["error"]
    assert found["logs"] == "asked for a\n"
    assert (await predict(api, text="b", times=1))["output"] == ["b 0"]


async def test_a_loop_ends_when_it_is_canceled(serve: Any) -> None:
    api = await serve(CLASS)
    running = (await api.http.post("/v1/predictions", json=LOOP)).json()
    await until_printed(api, running)
    await api.http.post(f"/v1/predictions/{running['id']}/cancel")
    assert (await until_over(api, running))["status"] == "canceled"
    assert (await predict(api, text="b", times=1))["output"] == ["b 0"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input.text", "Field required"),
    ({"text": ""}, "input.text", "at least 1 character"),
    ({"text": "a" * 21}, "input.text", "at most 20 characters"),
    ({"text": "a", "times": 6}, "input.times", "less than or equal to 5"),
    ({"text": "a", "times": "2"}, "input.times", "valid integer"),
    ({"text": "a", "mode": "sing"}, "input.mode", "'say', 'fail', 'loop' or 'exit'"),
    ({"text": "a", "word": 1}, "input.word", "unknown parameter"),
    ({"text": "a", "image": "x"}, "input.image", "must be a data: URI, an https URL"),
    ({"text": "a", "image": "data:,x"}, "input.image", "must be a base64 data: URI"),
]


async def test_wrong_inputs_are_refused_by_the_api(serve: Any) -> None:
    api = await serve(CLASS)
    for given, field, reason in WRONG:
        response = await api.http.post("/v1/predictions", json={"version": "mine", "input": given})
        assert response.status_code == 422, given
        (found,) = response.json()["invalid_fields"]
        assert found["field"] == field
        assert reason in found["description"]


async def test_null_is_the_same_as_leaving_an_input_out(serve: Any) -> None:
    """Replicate's clients send null. Cog either rejects null or passes it to the class."""
    api = await serve(CLASS)
    found = await predict(api, text="a", times=None, mode=None, image=None)
    assert (found["status"], found["output"]) == ("succeeded", ["a 0", "a 1"])
    wrong = await api.http.post(
        "/v1/predictions", json={"version": "mine", "input": {"text": None}}
    )
    assert wrong.status_code == 422
    assert "input.text" in wrong.text


async def test_files_and_secrets_go_in_and_are_not_shown(serve: Any) -> None:
    api = await serve(CLASS)
    uri = "data:image/png;base64," + base64.b64encode(b"x" * 100_000).decode()
    found = await predict(api, text="a", times=1, image=uri, password="open sesame")
    assert found["output"] == [".png of 100000 bytes", "11 secret letters", "a 0"]
    assert found["input"]["password"] == "**********"
    url = found["input"]["image"]
    file = (await api.http.get(url)).json()
    assert (await api.http.get(file["urls"]["download"])).content == b"x" * 100_000
    again = await predict(api, text="a", times=1, image=url)
    assert again["output"][0].endswith("of 100000 bytes")


async def test_files_come_as_links_or_inline_when_small(serve: Any) -> None:
    api = await serve(FILES)
    small = await predict(api, size=3, kind="txt")
    assert small["output"] == ["data:text/plain;base64,AAAA", "data:text/plain;base64,AQEB"]
    large = await predict(api, size=70_000, kind="html")
    for number, url in enumerate(large["output"]):
        response = await api.http.get(url)
        assert response.content == bytes([number]) * 70_000
        assert response.headers["content-type"].startswith("text/html")
        assert response.headers["content-security-policy"] == "sandbox; default-src 'none'"
    await api.http.delete(f"/v1/predictions/{large['id']}")
    assert [(await api.http.get(url)).status_code for url in large["output"]] == [404, 404]


async def test_elements_are_streamed_and_resumed(serve: Any) -> None:
    api = await serve(CLASS)
    body = {"version": "mine", "input": {"text": "line\nbreak", "times": 3}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    events = events_of((await api.http.get(created["urls"]["stream"])).text)
    said = [one["data"] for one in events if one["event"] == "output"]
    assert said == [f"line\nbreak {number}" for number in range(3)]
    assert events[-1]["event"] == "done"
    shown = (await api.http.get("/v1/models/me/mine")).json()["latest_version"]
    output = shown["openapi_schema"]["components"]["schemas"]["Output"]
    assert (output["x-cog-array-type"], output["items"]) == ("iterator", {"type": "string"})


BURSTS = """
class Predictor(BasePredictor):
    def predict(self, last: str) -> Iterator[str]:
        for number in range(8):
            yield f"{number}\u2028\x85{last}"
            if number == 3:
                time.sleep(0.5)
"""


async def test_readers_go_on_behind_each_element_of_a_burst(serve: Any) -> None:
    """The elements arrive in one chunk, and the connection may break between any two of them."""
    api = await serve(BURSTS)
    body = {"version": "mine", "input": {"last": "\u2029"}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    url = created["urls"]["stream"]
    events = events_of((await api.http.get(url)).text)
    said = [one["data"] for one in events if one["event"] == "output"]
    assert [one[0] for one in said] == list("01234567")
    for number, event in enumerate(events[:-1]):
        answer = await api.http.get(url, headers={"last-event-id": event["id"]})
        rest = events_of(answer.text)
        assert [one["data"] for one in rest] == [one["data"] for one in events[number + 1 :]]
    assert (await until_over(api, created))["output"][0] == "0\u2028\x85\u2029"


YIELDS_FILES = """
class Predictor(BasePredictor):
    def predict(self, folder: str) -> Iterator[Path]:
        path = Path(os.environ["TMPDIR"]) / "one.txt"
        for number, size in enumerate((3, 70_000, 70_000)):
            while not os.path.exists(os.path.join(folder, str(number))):
                time.sleep(0.01)
            path.write_bytes(bytes([97 + number]) * size)
            yield path
"""


async def test_files_are_streamed_as_they_are_made(serve: Any, tmp_path: Path) -> None:
    """Each file can be loaded before the next one exists, and reading resumes after it."""
    api = await serve(YIELDS_FILES)
    (tmp_path / "class/0").touch()
    (tmp_path / "class/1").touch()
    body = {"version": "mine", "input": {"folder": str(tmp_path / "class")}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    found, last_id = [], ""
    async with api.http.stream("GET", created["urls"]["stream"]) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
            if len(found) == 2:
                break
    assert found[0] == "data:text/plain;base64,YWFh"
    assert (await api.http.get(found[1])).content == b"b" * 70_000
    (tmp_path / "class/2").touch()
    resumed = {"last-event-id": last_id}
    rest = events_of((await api.http.get(created["urls"]["stream"], headers=resumed)).text)
    assert [one["event"] for one in rest] == ["output", "done"]
    assert (await api.http.get(rest[0]["data"])).content == b"c" * 70_000
    over = await until_over(api, created)
    keys = [key_of(url) for url in over["output"]]
    assert keys[1:] == [key_of(found[1]), key_of(rest[0]["data"])]
    whole = events_of((await api.http.get(created["urls"]["stream"])).text)
    assert [key_of(one["data"]) for one in whole[:-1]] == keys
    await api.http.delete(f"/v1/predictions/{created['id']}")
    assert (await api.http.get(found[1])).status_code == 404


def key_of(url: str) -> str:
    """A link without its signature, because the signature can differ between responses."""
    return url.partition("?")[0]


PRINTS = """
class Predictor(BasePredictor):
    def predict(self, folder: str) -> {output}:
        for number in range(3):
            print(f"line {{number}}\\u2028 and \\u00fc")
            while not os.path.exists(os.path.join(folder, str(number))):
                time.sleep(0.01)
        {end} "\\u2028"
"""


@pytest.mark.parametrize(("output", "end"), [("str", "return"), ("Iterator[str]", "yield")])
async def test_what_a_class_prints_is_shown_while_it_runs(
    serve: Any, tmp_path: Path, output: str, end: str
) -> None:
    api = await serve(PRINTS.format(output=output, end=end))
    body = {"version": "mine", "input": {"folder": str(tmp_path / "class")}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    line = "line {}\u2028 and \u00fc\n"
    shown = await until_printed(api, created)
    assert (shown["status"], shown["logs"]) == ("processing", line.format(0))
    url, said, last_id = created["urls"]["stream"], "", ""
    for number in range(3):
        headers = {"last-event-id": last_id} if last_id else {}
        async with api.http.stream("GET", url, headers=headers) as answer:
            blocks = blocks_of(answer.aiter_lines())
            async for block in blocks:
                if block["event"] == "logs":
                    said, last_id = said + block["data"], block["id"]
                    if f"line {number}" in said:
                        break
        (tmp_path / "class" / str(number)).touch()
    # Event stream readers treat this character as the end of a line.
    assert said == "".join(map(line.format, range(3))).replace("\u2028", "\n")
    over = await until_over(api, created)
    assert (over["status"], over["logs"]) == ("succeeded", "".join(map(line.format, range(3))))
    rest = events_of((await api.http.get(url, headers={"last-event-id": last_id})).text)
    assert [one["event"] for one in rest] == ["output", "done"]


async def test_what_was_printed_stays_if_it_is_canceled(serve: Any, tmp_path: Path) -> None:
    api = await serve(PRINTS.format(output="str", end="return"))
    body = {"version": "mine", "input": {"folder": str(tmp_path / "class")}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    await until_printed(api, created)
    await api.http.post(created["urls"]["cancel"])
    over = await until_over(api, created)
    assert (over["status"], over["logs"][:6]) == ("canceled", "line 0")
    await api.http.delete(created["urls"]["get"])
    assert (await api.http.get(created["urls"]["get"])).status_code == 404


async def until_printed(api: ApiUnderTest, created: dict[str, Any]) -> dict[str, Any]:
    """Returns the prediction once it has logs."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            shown: dict[str, Any] = (await api.http.get(created["urls"]["get"])).json()
            if shown["logs"]:
                return shown
            await asyncio.sleep(0.02)


async def blocks_of(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, str]]:
    """A stream's events as they arrive."""
    held: list[str] = []
    async for line in lines:
        if line:
            held.append(line)
            continue
        for event in events_of("\n".join(held)):
            yield event
        held = []


@pytest.mark.parametrize(("is_read", "cost_usd"), [(True, 0.25), (False, 0.0)])
async def test_what_was_read_of_a_stream_is_paid_though_it_is_canceled(
    serve: Any, is_read: bool, cost_usd: float
) -> None:
    """Otherwise, a caller who cancels after the last piece would read everything for free."""
    api = await serve(TALKS_ON)
    running = (await api.http.post("/v1/predictions", json=TALK)).json()
    if is_read:
        async with api.http.stream("GET", running["urls"]["stream"]) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: piece"):
                    break
    await api.http.post(f"/v1/predictions/{running['id']}/cancel")
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not api.rows:  # noqa: ASYNC110  the worker writes it once the class has stopped
            await asyncio.sleep(0.01)
    ended = await until_over(api, running)
    assert ended["status"] == "canceled"
    (row,) = api.rows
    charge = (row.status, row.cost_usd, row.tokens)
    assert charge == ("canceled", cost_usd, None)
    assert (ended["metrics"] or {}).get("cost_usd", 0.0) == cost_usd


def events_of(text: str) -> list[dict[str, str]]:
    found = []
    for block in filter(None, text.split("\n\n")):
        lines = [line.partition(": ") for line in block.splitlines()]
        event = {name: value for name, _, value in lines if name != "data"}
        event["data"] = "\n".join(value for name, _, value in lines if name == "data")
        found.append(event)
    return [one for one in found if "event" in one]


async def test_replicates_client_gets_what_the_class_gives(serve: Any) -> None:
    api = await serve(CLASS)
    client = Client(api_token="any", base_url=api.url)
    output: Any = await client.async_run("me/mine", input={"text": "a", "times": 3})
    await client._async_client.aclose()
    assert list(output) == ["a 0", "a 1", "a 2"]


async def test_replicates_client_gets_a_file_object_as_the_page_says(serve: Any) -> None:
    """The client sends only `https:` or `data:` URIs: docs/how-to/clients.md."""
    api = await serve(FILES)
    client = Client(api_token="any", base_url=api.url)
    small: Any = await client.async_run("me/mine", input={"size": 3})
    assert [await one.aread() for one in small] == [b"\0" * 3, b"\1" * 3]
    large: Any = await client.async_run("me/mine", input={"size": 70_000})
    assert all(type(one) is str and one.startswith("http://") for one in large)
    wrapped = [FileOutput(one, client) for one in large]
    assert [await one.aread() for one in wrapped] == [b"\0" * 70_000, b"\1" * 70_000]
    secure: Any = transform_output([one.replace("http:", "https:") for one in large], client)
    assert all(isinstance(one, FileOutput) for one in secure)
    await client._async_client.aclose()


async def test_a_schema_is_all_that_the_api_needs(serve: Any) -> None:
    api = await serve(CLASS)
    found = (await api.http.get("/v1/models/me/mine")).json()["latest_version"]["openapi_schema"]
    given = found["components"]["schemas"]["Input"]
    assert given["properties"]["times"] == {
        "type": "integer",
        "title": "Times",
        "default": 2,
        "minimum": 1,
        "maximum": 5,
        "x-order": 1,
    }
    assert json.dumps(given["required"]) == '["text"]'
