"""A recording of an hour through the whole stack, and by faster-whisper called directly.

It has five sentences of LibriVox again and again, in changing order, loudness and distance, so no
two windows are equal and no cache helps. Both compute on one thread. CPU time is compared, because
the machine has other load: real-time factors are CPU seconds per second of sound.

Needs Debian's pocketsphinx-testdata for the sentences: BENCH_RECORDINGS names the folder with them.
BENCH_MINUTES: another length.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml

from bench.pipeline import BROKER, Part, say_nothing
from bench.report import Figure, Outcome
from examples.show import EXAMPLES, KEPT, fetch_weights
from infra.local.interfaces import refresh_interfaces
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.up import served_stack
from workers.models.custom.environments import python_for

MINUTES = float(os.environ.get("BENCH_MINUTES", "60"))
RECORDINGS = Path(os.environ.get("BENCH_RECORDINGS", KEPT / "transcribe" / "recordings"))
NAME = "transcribe"
LIMIT_S = 3600.0
MAX_RATIO = 1.1
POLL_S = 0.5


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
        ours = _through_the_stack(Path(folder), recording)
        direct = {
            kind: json.loads(_oracle(python, "direct", kind, recording))
            for kind in ("windows", "batched", "sequence")
        }
    sound_s = MINUTES * 60
    ratio = ours["cpu_s"] / direct["windows"]["cpu_s"]
    figures = [
        Figure("CPU seconds per second of sound, whole stack", ours["cpu_s"] / sound_s, ""),
        Figure("the same, worker and class alone", ours["worker_cpu_s"] / sound_s, ""),
        *(
            Figure(f"the same, faster-whisper: {kind}", one["cpu_s"] / sound_s, "")
            for kind, one in direct.items()
        ),
        Figure("whole stack over faster-whisper: windows", ratio, "", "<=", MAX_RATIO),
        Figure("the most memory of the class", ours["class_mib"], "MiB"),
        *(
            Figure(f"the most memory, faster-whisper: {kind}", one["mib"], "MiB")
            for kind, one in direct.items()
        ),
        Figure("seconds until the first segment", ours["first_s"], "s"),
        Figure("seconds until the last one", ours["wall_s"], "s"),
    ]
    is_equal = ours["text"] == direct["windows"]["text"]
    failure = "" if is_equal else "the transcript is not that of faster-whisper"
    texts = {kind: one.pop("text") for kind, one in direct.items()}
    details = {"direct": direct, "characters": {kind: len(one) for kind, one in texts.items()}}
    return Outcome(figures, details, failure)


def _oracle(python: str, *arguments: str | Path) -> str:
    command = [python, str(EXAMPLES / NAME / "oracle.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def _through_the_stack(folder: Path, recording: Path) -> dict[str, Any]:
    (entry,) = yaml.safe_load((EXAMPLES / NAME / "models.yaml").read_text())["models"]
    entry |= {"source": f"local:{EXAMPLES / NAME}", "deadline": {"default_s": LIMIT_S}}
    entry["deadline"]["longest_s"] = LIMIT_S
    models_file = folder / "models.yaml"
    models_file.write_text(yaml.safe_dump({"models": [entry]}))
    refresh_interfaces(models_file, lambda line: None)
    variables = {"PENSTOCK_MODELS_FILE": str(models_file), "PENSTOCK_PROCESSES": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    with served_stack(folder / "state", Ports.free(), variables, say_nothing, BROKER) as stack:
        return _transcribed(stack, recording)


def _transcribed(stack: Stack, recording: Path) -> dict[str, Any]:
    """The transcript by a prediction, and what it took."""
    client: Any = openai.OpenAI(base_url=f"{stack.api_url}/v1", api_key="any", timeout=LIMIT_S)
    upload = client.files.create(file=recording, purpose="user_data")
    worker = Part(stack.ports.health[0])
    parts = [Part(stack.ports.api), worker, Part(stack.ports.redis)]
    broker = stack.ports.rabbitmq if stack.broker == "rabbitmq" else stack.ports.pubsub
    parts.append(Part(broker))
    before_s, before_class_s = _cpu_s(parts), worker.cpu_s() + worker.children_cpu_s()
    taken = _followed(client, stack, upload.id, worker)
    return taken | {
        "cpu_s": _cpu_s(parts) - before_s,
        "worker_cpu_s": worker.cpu_s() + worker.children_cpu_s() - before_class_s,
    }


def _cpu_s(parts: list[Part]) -> float:
    return sum(one.cpu_s() + one.children_cpu_s() for one in parts)


def _followed(client: Any, stack: Stack, file_id: str, worker: Part) -> dict[str, Any]:
    """Waits for a prediction, and looks at what it prints and how much memory it takes."""
    began_s, first_s, most_bytes = time.monotonic(), 0.0, 0
    http = httpx.Client(base_url=stack.api_url, timeout=LIMIT_S)
    body = {"version": NAME, "input": {"file": file_id}}
    created = http.post("/v1/predictions", json=body).raise_for_status().json()
    while True:
        shown = http.get(f"/v1/predictions/{created['id']}").raise_for_status().json()
        most_bytes = max(most_bytes, worker.tree_rss_bytes())
        if shown["logs"] and not first_s:
            first_s = time.monotonic() - began_s
        if shown["status"] not in ("starting", "processing"):
            break
        time.sleep(POLL_S)
    if shown["status"] != "succeeded":
        raise RuntimeError(shown["error"])
    return {
        "text": "".join(one["text"] for one in shown["output"]).strip(),
        "first_s": first_s,
        "wall_s": time.monotonic() - began_s,
        "class_mib": most_bytes / 1024 / 1024,
    }
