"""A recording of an hour through the whole stack, and by faster-whisper called directly.

It has five sentences of LibriVox again and again, in changing order, loudness and distance, so no
two windows are equal and no cache helps. The stack reads it twice: by the class alone on one
worker, and as a flow whose windows spread over two workers, of which one is killed in the middle
and started again. All compute on one thread each. CPU time is compared, because the machine has
other load: real-time factors are CPU seconds per second of sound.

Needs Debian's pocketsphinx-testdata for the sentences: BENCH_RECORDINGS names the folder with them.
BENCH_MINUTES: another length.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from bench.pipeline import BROKER, READY_LIMIT_S, Part, another, say_nothing
from bench.report import Figure, Outcome
from examples.show import EXAMPLES, KEPT, fetch_weights
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.process import Process, answers, free_port
from infra.local.stack import Stack
from infra.local.supervision import Supervisor
from infra.local.up import served_stack
from workers.models.custom.environments import python_for

MINUTES = float(os.environ.get("BENCH_MINUTES", "60"))
RECORDINGS = Path(os.environ.get("BENCH_RECORDINGS", KEPT / "transcribe" / "recordings"))
NAME, FLOW = "transcribe", "transcribe-long"
STEPS = {"windows": {"work": {"max": 7200}}, "transcript": {}}
"""The other classes of the flow, and what is in their entries."""
LIMIT_S = 3600.0
MAX_RATIO = 1.1
POLL_S = 0.5
STREAM_LIMIT_S = 60.0
"""Without a byte of a stream. It has a heartbeat every 10 s."""


def run() -> Outcome:
    """Compares transcripts and CPU seconds."""
    fetch_weights(NAME)
    python = python_for(EXAMPLES / NAME)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "long.flac"
        sentences = sorted(RECORDINGS.rglob("*.wav"))
        if not sentences:
            return Outcome([], failure=f"no recordings in {RECORDINGS}")
        _oracle(python, "longer", recording, str(MINUTES), *sentences)
        alone, killed = _through_the_stack(Path(folder), recording)
        direct = {
            kind: json.loads(_oracle(python, "direct", kind, recording))
            for kind in ("windows", "sequence", "batched")
        }
    transcripts = {"class": alone["text"], "flow": killed["text"]} | {
        kind: one.pop("text") for kind, one in direct.items()
    }
    wrong = [kind for kind in ("class", "flow") if transcripts[kind] != transcripts["windows"]]
    failure = f"not the transcript of faster-whisper: {', '.join(wrong)}" if wrong else ""
    characters = {kind: len(text) for kind, text in transcripts.items()}
    details = {"class": alone, "flow": killed, "direct": direct, "characters": characters} | {
        "load_after": round(os.getloadavg()[0], 2)
    }
    for one in (alone, killed):
        one.pop("text")
    return Outcome(_figures(alone, killed, direct), details, failure)


def _figures(
    alone: dict[str, Any], killed: dict[str, Any], direct: dict[str, dict[str, Any]]
) -> list[Figure]:
    sound_s = MINUTES * 60
    ours = {"class alone": alone, "flow, a worker killed": killed}
    figures = [Figure("seconds of sound", sound_s, "s")]
    for kind, one in ours.items():
        figures += [
            Figure(f"CPU seconds per second of sound, {kind}", one["cpu_s"] / sound_s, ""),
            Figure(f"seconds per second of sound, {kind}", one["wall_s"] / sound_s, ""),
        ]
    for kind, one in direct.items():
        shown = f"faster-whisper: {kind}"
        figures += [
            Figure(f"CPU seconds per second of sound, {shown}", one["cpu_s"] / sound_s, ""),
            Figure(f"seconds per second of sound, {shown}", one["wall_s"] / sound_s, ""),
            Figure(f"the most memory, {shown}", one["mib"], "MiB"),
        ]
    for kind, one in ours.items():
        for other in ("windows", "sequence"):
            ratio = one["cpu_s"] / direct[other]["cpu_s"]
            name = f"CPU, {kind}, over faster-whisper: {other}"
            figures.append(Figure(name, ratio, "", "<=", MAX_RATIO))
    return [
        *figures,
        Figure("the most memory of the class", alone["class_mib"], "MiB"),
        Figure("seconds until the first segment, class alone", alone["first_s"], "s"),
        Figure("seconds until the first segment, flow", killed["first_s"], "s"),
        Figure("windows", killed["windows"], ""),
        Figure("windows that were there at the kill", killed["at_kill"], ""),
    ]


def _oracle(python: str, *arguments: str | Path) -> str:
    command = [python, str(EXAMPLES / NAME / "oracle.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def _catalog() -> dict[str, Any]:
    """The class, and the flow of docs/how-to/speech.md."""
    (entry,) = yaml.safe_load((EXAMPLES / NAME / "models.yaml").read_text())["models"]
    deadline = {"default_s": LIMIT_S, "longest_s": LIMIT_S}
    entry |= {"source": f"local:{EXAMPLES / NAME}", "deadline": deadline}
    others = [
        {"name": name, "task": "custom", "source": f"local:{EXAMPLES / name}"}
        | {"deterministic": True, "deadline": deadline}
        | fields
        for name, fields in STEPS.items()
    ]
    joined = {"windows": {"segments": "$read", "parts": "$cut.parts"}, "duration": "$cut.duration"}
    steps = [
        {"id": "cut", "model": "windows", "input": {"file": "$input.file"}},
        {
            "id": "read",
            "model": NAME,
            "for_each": "$cut.windows",
            "input": {"file": "$item", "vad_filter": False},
            "retries": 1,
        },
        {"id": "join", "model": "transcript", "input": joined},
    ]
    flow = {"name": FLOW, "api": "transcription", "input": {"file": "file"}, "steps": steps}
    flow |= {"output": "$join", "deadline": deadline}
    return {"models": [entry, *others], "flows": [flow]}


def _through_the_stack(folder: Path, recording: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the class alone, and the flow with a worker that is killed, gave and took."""
    models_file = folder / "models.yaml"
    models_file.write_text(yaml.safe_dump(_catalog()))
    refresh_interfaces(models_file, lambda line: None)
    variables = {"PENSTOCK_MODELS_FILE": str(models_file), "PENSTOCK_PROCESSES": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    with served_stack(folder / "state", Ports.free(), variables, say_nothing, BROKER) as stack:
        client = openai.OpenAI(base_url=f"{stack.api_url}/v1", api_key="any", timeout=LIMIT_S)
        upload = client.files.create(file=recording, purpose="user_data")
        alone = _transcribed(stack, upload.id)
        port = free_port()
        own = {"PENSTOCK_MODEL": NAME, "PENSTOCK_HEALTH_PORT": str(port)}
        with another(stack, "another-worker", "workers", port, own) as second:
            return alone, _killed(stack, upload.id, second)


@dataclass
class CpuCost:
    """CPU seconds of the parts of a stack, also of those that were killed and started again."""

    ports: list[int]
    before_s: dict[int, float] = field(default_factory=dict)
    dead_s: float = 0.0

    def __post_init__(self) -> None:
        self.before_s = {port: self._of(port) for port in self.ports}

    @staticmethod
    def _of(port: int) -> float:
        part = Part(port)
        return part.cpu_s() + part.children_cpu_s()

    def note_death(self, port: int) -> None:
        """Keeps what a part has taken, just before it dies."""
        self.dead_s += self._of(port) - self.before_s[port]
        self.before_s[port] = 0.0

    def total_s(self) -> float:
        """What all have taken since this began."""
        return self.dead_s + sum(self._of(port) - self.before_s[port] for port in self.ports)


def _ports(stack: Stack, *workers: int) -> list[int]:
    """The ports of the parts that have something to do."""
    ports = stack.ports
    broker = ports.rabbitmq if stack.broker == "rabbitmq" else ports.pubsub
    return [ports.api, ports.redis, broker, *workers]


def _created(http: httpx.Client, version: str, file_id: str) -> str:
    body = {"version": version, "input": {"file": file_id}}
    return str(http.post("/v1/predictions", json=body).raise_for_status().json()["id"])


def _shown(http: httpx.Client, prediction: str) -> dict[str, Any]:
    shown: dict[str, Any] = http.get(f"/v1/predictions/{prediction}").raise_for_status().json()
    if shown["status"] not in ("starting", "processing", "succeeded"):
        raise RuntimeError(shown["error"])
    return shown


def _text(shown: dict[str, Any]) -> str:
    return "".join(one["text"] for one in shown["output"]).strip()


def _transcribed(stack: Stack, file_id: str) -> dict[str, Any]:
    """The transcript of the class alone, and what it took."""
    cost, worker = CpuCost(_ports(stack, stack.ports.health[0])), Part(stack.ports.health[0])
    began_s, first_s, most_bytes = time.monotonic(), 0.0, 0
    with httpx.Client(base_url=stack.api_url, timeout=LIMIT_S) as http:
        prediction = _created(http, NAME, file_id)
        while (shown := _shown(http, prediction))["status"] != "succeeded":
            most_bytes = max(most_bytes, worker.tree_rss_bytes())
            if shown["logs"] and not first_s:
                first_s = time.monotonic() - began_s
            time.sleep(POLL_S)
    return {
        "text": _text(shown),
        "first_s": first_s,
        "wall_s": time.monotonic() - began_s,
        "class_mib": most_bytes / 1024 / 1024,
        "cpu_s": cost.total_s(),
    }


def _killed(stack: Stack, file_id: str, second: Part) -> dict[str, Any]:
    """The transcript of the flow by two workers of which one is killed, and what it took."""
    port, worker = stack.ports.health[0], stack.processes[f"worker-{NAME}"]
    cost = CpuCost(_ports(stack, *stack.ports.health[: 1 + len(STEPS)], second.port))
    supervisor = Supervisor(stack.parts, stack.report)
    began_s, first_s, done, windows, at_kill = time.monotonic(), 0.0, 0, 0, 0
    with httpx.Client(base_url=stack.api_url, timeout=STREAM_LIMIT_S) as http:
        prediction = _created(http, FLOW, file_id)
        for event in _events(http, prediction, supervisor):
            if event.get("step") == "cut":
                windows = len(event["output"]["windows"])
            elif event.get("step") == "read":
                done, first_s = done + 1, first_s or time.monotonic() - began_s
                if not at_kill and done >= windows / 2:
                    at_kill = done
                    _kill(worker, port, cost)
        shown, wall_s = _shown(http, prediction), time.monotonic() - began_s
    until_s = time.monotonic() + READY_LIMIT_S
    while not answers(port, "/readyz") and time.monotonic() < until_s:
        supervisor.look()
        time.sleep(POLL_S)
    return {
        "text": _text(shown),
        "first_s": first_s,
        "wall_s": wall_s,
        "cpu_s": cost.total_s(),
        "windows": windows,
        "at_kill": at_kill,
        "steps": shown["metrics"]["steps"],
    }


def _kill(worker: Process, port: int, cost: CpuCost) -> None:
    cost.note_death(port)
    worker.kill()


def _events(
    http: httpx.Client, prediction: str, supervisor: Supervisor
) -> Iterator[dict[str, Any]]:
    """Yields the outputs of a run in order. A stream ends after 290 s, and goes on behind an id.

    Meanwhile parts that died are started again.
    """
    url, last_id, kind = f"/v1/predictions/{prediction}/stream", "", ""
    while True:
        headers = {"accept": "text/event-stream", "last-event-id": last_id}
        with http.stream("GET", url, headers=headers) as answer:
            for line in answer.raise_for_status().iter_lines():
                if failure := supervisor.look():
                    raise RuntimeError(failure)
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "id":
                    last_id = value
                elif name == "data" and kind == "output":
                    yield json.loads(value)
                elif name == "data" and kind in ("done", "error"):
                    return
