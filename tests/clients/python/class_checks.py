"""Replicate's client against custom classes, one for each form of input and output.

The expected results come from calling each class directly. They are in the file
PENSTOCK_CLIENTS_EXPECTED (tests/workers/models/custom/forms).
"""

from __future__ import annotations

import io
import json
import queue
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from replicate.client import Client
from replicate.exceptions import ReplicateError
from replicate.webhook import Webhooks

from tests.clients.python.checks import (
    EXPECTED,
    KEY,
    LIMIT_S,
    URL,
    check,
    main,
    raises,
    serving,
)

Form = dict[str, Any]
FORMS: list[Form] = json.loads(Path(EXPECTED).read_text()) if EXPECTED else []
client: Any = Client(api_token=KEY, base_url=URL)
"""Untyped, so that checks can inspect any response."""


def given(form: Form) -> dict[str, Any]:
    files = {
        name: _opened(texts) if isinstance(texts, str) else list(map(_opened, texts))
        for name, texts in form["files"].items()
    }
    return {**form["input"], **files}


def _opened(text: str) -> io.BytesIO:
    file = io.BytesIO(text.encode())
    file.name = "in.txt"
    return file


def plain(value: Any) -> Any:
    """An output with files replaced by their text."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, str):
        # The client only creates files from https: and data: URIs, but this API speaks plain HTTP.
        is_file = value.startswith(("data:", f"{URL}/"))
        return {"file": _loaded(value)} if is_file else value
    return {"file": bytes(value.read()).decode()} if hasattr(value, "read") else value


def _loaded(uri: str) -> str:
    with urllib.request.urlopen(uri, timeout=LIMIT_S) as answer:
        data: bytes = answer.read()
    return data.decode()


def run(form: Form) -> None:
    """The output, with uploaded files and with files inside the body."""
    for strategy in ("url", "base64") if form["files"] else ("url",):
        output = client.run(
            f"any/{form['model']}", input=given(form), file_encoding_strategy=strategy
        )
        same(plain(output), form["output"])


def streamed(form: Form) -> None:
    """The events, one per list element, and the printed output."""
    created = client.predictions.create(version=form["model"], input=given(form))
    events = [(event.event.value, event.data) for event in created.stream()]
    outputs = [data for kind, data in events if kind == "output"]
    assert events[-1][0] == "done", events[-1]
    assert "".join(data for kind, data in events if kind == "logs") == "begins\n", events
    same_events(outputs, form["output"])


def same_events(outputs: list[Any], expected: Any) -> None:
    """Fails unless the events have this output.

    A returned list is one event, and each generator element is one event. An event may contain
    several texts. The API also treats U+2028 as a line break, because some clients do.
    """
    if isinstance(expected, str):
        expected = expected.replace("\u2028", "\n")
    if len(outputs) == 1 and _element(outputs[0]) == expected:
        return
    is_list = isinstance(expected, list)
    elements = expected if is_list else [] if expected is None else [expected]
    texts = [one for one in elements if isinstance(one, str)]
    if is_list and len(texts) == len(elements):
        same("".join(outputs), "".join(texts).replace("\u2028", "\n"))
        return
    same([_element(data) for data in outputs], elements)


def _element(data: Any) -> Any:
    try:
        return plain(json.loads(data))
    except (TypeError, ValueError):  # a file or text
        return plain(data)


def same(got: Any, expected: Any) -> None:
    assert got == expected, f"{str(got)[:500]}, not {str(expected)[:500]}"


def called_back(form: Form) -> None:
    """The output in a webhook, whose signature is checked."""
    with receiving() as (url, calls):
        created = client.predictions.create(
            version=form["model"],
            input=given(form),
            webhook=f"{url}/done",
            webhook_events_filter=["completed"],
        )
        headers, body = calls.get(timeout=LIMIT_S)
    Webhooks.validate(headers=headers, body=body, secret=client.webhooks.default.secret())
    told = json.loads(body)
    same((told["id"], told["status"], told["logs"]), (created.id, "succeeded", "begins\n"))
    same(plain(told["output"]), form["output"])


@contextmanager
def receiving() -> Iterator[tuple[str, queue.Queue[tuple[dict[str, str], str]]]]:
    """A webhook receiver: its URL, and the headers and bodies that it received."""
    calls: queue.Queue[tuple[dict[str, str], str]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            calls.put(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps request logs out of the output."""

    with serving(Receiver) as url:
        yield url, calls


def canceled(form: Form) -> None:
    """A running prediction is canceled, and the next one is computed."""
    running = client.predictions.create(
        version=form["model"], input=given(form) | {"forever": True}
    )
    # Output printed by a batch is shown with the batch's results.
    logs = "" if "batches" in form["model"] else "begins\n"
    until_s = time.monotonic() + LIMIT_S
    while (running.status, running.logs or "") != ("processing", logs):
        assert time.monotonic() < until_s, (running.status, running.logs)
        running.reload()
    running.cancel()
    running.wait()
    same((running.status, running.output), ("canceled", None))
    assert running.logs.startswith(logs), running.logs
    same(plain(client.run(f"any/{form['model']}", input=given(form))), form["output"])


def add(title: str, body: Callable[[], None]) -> None:
    """Adds a check with this title."""

    def one() -> None:
        body()

    one.__name__ = title
    check(one)


for number, form in enumerate(FORMS):
    name = f"{form['model']} {number}"
    add(f"{name}: run", partial(run, form))
    add(f"{name}: stream", partial(streamed, form))
    add(f"{name}: webhook", partial(called_back, form))
    if form["model"] not in {one["model"] for one in FORMS[:number]}:
        add(f"{name}: cancel", partial(canceled, form))


@check
def an_error_of_the_class_with_its_traceback() -> None:
    failed = client.predictions.create(version="form-pieces", input={"text": "fail"})
    failed.wait()
    assert (failed.status, failed.error) == ("failed", "ValueError: it does not want to")
    assert "ValueError" in failed.logs


@check
def wrong_input_names_the_field() -> None:
    for given, field in (
        ({"text": "a"}, "text"),
        ({"text": "UPPER"}, "text"),
        ({}, "text"),
        ({"text": "any", "other": 1}, "other"),
    ):
        with raises(ReplicateError) as caught:
            client.run("any/form-text", input=given)
        assert caught.error.status == 422
        assert f"input.{field}" in (caught.error.detail or "")


main()
