"""Starts and stops a contender: a peer in its own environment, or Penstock's local stack."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil

from bench.load.generator import LoadOrder, LoadReport, drive
from bench.peers.answers import PLACE, bodies_of, vector_of
from bench.peers.environments import FOLDER, programs_of
from bench.peers.roster import OFFLINE, Contender
from bench.peers.tree import Tree
from bench.pipeline import read_shipped_models, say_nothing, write_catalog
from infra.local.ports import Ports
from infra.local.process import Process, free_port
from infra.local.stack import Stack
from infra.local.stack_processes import RabbitServer
from infra.local.up import build_stack
from shared.settings import environment_with

HERE = Path(__file__).parent
READY_LIMIT_S = 180.0
FIRST_ANSWER_LIMIT_S = 30.0
STOP_LIMIT_S = 15.0
ANSWER_LIMIT_S = 120.0
SAMPLE_EVERY = 16


@dataclass(frozen=True)
class Serving:
    """A contender that is serving: its port, seconds to its first vector, and processes."""

    contender: Contender
    port: int
    ready_s: float
    tree: Tree

    def drive(
        self, texts: list[str], in_flight: int, send_s: float, rate_per_s: float = 0.0
    ) -> LoadReport:
        order = LoadOrder(
            self.port,
            bodies_of(self.contender.body, texts),
            in_flight,
            path=self.contender.path,
            send_s=send_s,
            rate_per_s=rate_per_s,
            limit_s=ANSWER_LIMIT_S,
            sample_every=SAMPLE_EVERY,
        )
        return drive(order)


@contextmanager
def serving(contender: Contender, model_folder: Path) -> Iterator[Serving]:
    """Yields the contender while it serves.

    Raises:
        PenstockError: the contender can't be installed or started. The message contains the reason.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        before = set(psutil.Process().children())
        began_s = time.monotonic()
        if contender.group == "ours":
            port = stack.enter_context(stack_of(contender, Path(folder))).ports.api
        else:
            port = _peer(contender, Path(folder), model_folder, stack)
        tree = Tree([child for child in psutil.Process().children() if child not in before])
        serves = Serving(contender, port, time.monotonic() - began_s, tree)
        try:
            yield serves
        finally:
            tree.thaw()
            tree.remember()
            stack.close()
            tree.end()


def _peer(contender: Contender, log_dir: Path, model_folder: Path, stack: ExitStack) -> int:
    """Starts a peer's programs, and returns its port once it has returned a vector."""
    home = HERE / contender.folder
    port = free_port()
    places: dict[str, object] = {
        "port": port,
        "spare": free_port(),
        "spare2": free_port(),
        "home": home,
        "bin": programs_of(home / "requirements.txt"),
        "model": model_folder,
    }
    if contender.broker == "rabbitmq":
        rabbit = stack.enter_context(RabbitServer(log_dir / "rabbitmq", log_dir))
        places["broker"] = rabbit.port
    own = {name: value.format_map(places) for name, value in contender.environment.items()}
    environment = environment_with(OFFLINE | own)
    for number, command in enumerate(contender.commands):
        words = [word.format_map(places) for word in command]
        name = f"{contender.key}-{number}"
        process = Process(name, words, log_dir, environment=environment, stop_limit_s=STOP_LIMIT_S)
        stack.enter_context(process)
    process.wait_ready(partial(_gives_vector, contender, port), READY_LIMIT_S)
    return port


def _gives_vector(contender: Contender, port: int) -> bool:
    """Returns whether the peer returns a vector. Some peers listen before their model is loaded."""
    body = msgspec.json.encode(contender.body).replace(PLACE.encode(), b"ready")
    url, headers = f"http://127.0.0.1:{port}{contender.path}", {"content-type": "application/json"}
    try:
        answer = httpx.post(url, content=body, headers=headers, timeout=FIRST_ANSWER_LIMIT_S)
        return bool(vector_of(answer.content, contender.answer))
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False


def stack_of(contender: Contender, state_dir: Path) -> Stack:
    """Returns the `penstock up` stack, not yet started, with the contender's catalog entry."""
    settings = {}
    if contender.entry:
        catalog = write_catalog(state_dir, read_shipped_models(contender.entry))
        settings["PENSTOCK_MODELS_FILE"] = str(catalog)
        # The artifact is not shared, because one created for one serving mode has fewer variants to
        # choose from.
        settings["PENSTOCK_ARTIFACTS_DIR"] = str((FOLDER / "artifacts" / contender.key).resolve())
    return build_stack(state_dir, Ports.free(), settings, say_nothing, contender.broker)
