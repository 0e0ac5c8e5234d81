"""`python -m workers.runtime.server`: a model process, which runs batches received on a socket.

It is passed one end of a socket pair. It sends Ready (or Refused), then one result per batch. It
exits as soon as the other end is closed, even in the middle of a batch. Normally it is forked from
a template, which is the same program: it loads everything that processes can share, then forks on
request (workers/runtime/template.py).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from shared.errors import PenstockError
from shared.logs import configure_logs
from shared.models.catalog import Model
from shared.process.inspection import deny_inspection
from shared.process.process_tree import list_threads
from workers.models.backend import Backend
from workers.models.base import GpuLost, LoadedModel
from workers.models.reports import Ready
from workers.models.step_shares import StepRoom
from workers.runtime import template
from workers.runtime.execution import StepExecution, run_batch
from workers.runtime.overlap import OverlappedBatches, leave_without_gpu
from workers.runtime.protocol import (
    Cancel,
    Evict,
    Refused,
    RunBatch,
    ServerMessage,
    encode_server_message,
    read_client_message,
)
from workers.runtime.resident_models import ResidentModels, resident_bytes
from workers.runtime.template import TemplateReady
from workers.tasks import WORKER_TASKS, model_for

_BEGAN_S = time.monotonic()

log = logging.getLogger(__name__)


def main() -> int:
    """Serves the models until the socket closes. Returns the exit status."""
    configure_logs("WARNING")
    # Only the I/O process handles signals sent to the whole process group (Ctrl-C, a supervisor's
    # TERM). It drains and then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with gpus_hidden():
        argv = template.import_first(sys.argv[1:])
    arguments = _arguments(argv)
    if arguments.deny_inspection:
        deny_inspection()
    loaded: dict[int, LoadedModel] = {}
    if arguments.fd is None:
        with gpus_hidden():
            loaded = _load_ahead(arguments)
        child = _fork_for(arguments, loaded)
        if child is None:
            return 0
        arguments.fd, arguments.device = child.fd, child.device
    template.name_process(template.MODEL_PROCESS_NAME)
    return serve(arguments, loaded)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="workers.runtime.server", description=__doc__)
    parser.add_argument("--fd", type=int, help="the inherited end of the socket pair")
    parser.add_argument(
        "--template-fd",
        type=int,
        help="descriptor for fork requests of a template, instead of --fd",
    )
    parser.add_argument(
        "--model", action="append", required=True, help="a catalog entry as JSON; may be repeated"
    )
    parser.add_argument(
        "--folder",
        action="append",
        type=Path,
        required=True,
        help="folder of the model's files; one per --model",
    )
    parser.add_argument(
        "--memory-budget-bytes",
        type=int,
        default=0,
        help="memory for all models together (0: unlimited)",
    )
    parser.add_argument(
        "--backend",
        action="append",
        help="backend to run it on, as JSON (default or null: torch)",
    )
    parser.add_argument(
        "--deny-inspection",
        action="store_true",
        help="prevent processes of the same user, such as custom classes, from reading its memory",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-fraction", type=float, default=1.0)
    return parser.parse_args(argv)


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Hides all GPUs from libraries within this context. When imported, diffusers looks for a GPU.

    Both CUDA and NVML start a thread to do so, and a process with threads can't be forked.
    """
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        if visible is None:
            del os.environ[name]
        else:
            os.environ[name] = visible


def _load_ahead(arguments: argparse.Namespace) -> dict[int, LoadedModel]:
    """Imports libraries and loads whatever forks can share, on one thread so that forking is safe.

    On a CPU without a memory budget, weights are shared. ONNX Runtime sessions are not shared,
    because they start threads.
    """
    template.name_process(template.TEMPLATE_NAME)
    template.die_with_parent()
    loaded = {}
    for number, make in enumerate(_makers(arguments, threads=1)):
        try:
            model = make()
            backend = _backends(arguments)[number]
            if (
                arguments.device == "cpu"
                and not arguments.memory_budget_bytes
                and (backend is None or not backend.graph)
            ):
                model.setup()
                loaded[number] = model
        except Exception:
            # The boundary with the model libraries. The forked process tries again and reports the
            # error.
            log.debug(
                "model could not be loaded in advance", exc_info=True, extra={"model": number}
            )
    return loaded


def _fork_for(
    arguments: argparse.Namespace, loaded: Mapping[int, LoadedModel]
) -> template.ForkedChild | None:
    """Forks on request.

    Returns in each forked process; in the template, returns None when it shuts down.
    """
    facts = TemplateReady(
        time.monotonic() - _BEGAN_S,
        len(loaded),
        resident_bytes(),
        list_threads(os.getpid()),
    )
    child = template.ForkServer(socket.socket(fileno=arguments.template_fd)).run(facts)
    if child is not None and not child.is_sound:
        template.start_anew(child)
    if child is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(arguments.threads)
    return child


def serve(arguments: argparse.Namespace, loaded: Mapping[int, LoadedModel]) -> int:
    """Loads the models and runs batches until the socket closes. Returns the exit status."""
    connection = socket.socket(fileno=arguments.fd)
    threading.Thread(target=_exit_on_hangup, args=(arguments.fd,), daemon=True).start()
    rooms = [StepRoom(Model.model_validate_json(entry)) for entry in arguments.model]
    try:
        return ModelServer(connection, _resident_models(arguments, loaded), rooms).run()
    except GpuLost as error:
        leave_without_gpu(error)


class ModelServer:
    """Serves the I/O process at the other end of `connection`. `rooms`: each model's capacity."""

    def __init__(
        self,
        connection: socket.socket,
        resident_models: ResidentModels,
        rooms: Sequence[StepRoom],
    ) -> None:
        self._connection = connection
        self._resident_models = resident_models
        self._rooms = rooms
        self._overlapped = OverlappedBatches(resident_models, self._send)

    def run(self) -> int:
        """Loads the models and runs batches until the socket closes. Returns the exit status."""
        try:
            self._resident_models.open()
        except PenstockError as error:
            self._send(Refused(error.code, error.message, error.field))
            return 2
        self._send(self._ready())
        with contextlib.suppress(ConnectionError):  # the I/O process has hung up
            while (message := read_client_message(self._connection)) is not None:
                if isinstance(message, RunBatch):
                    self._run(message)
                elif isinstance(message, Evict):
                    self._overlapped.finish()
                    self._resident_models.evict(message.models)
                elif isinstance(message, Cancel):
                    self._overlapped.cancel(message.number)
                # Anything else is meant for a batch that is done.
        return 0

    def _run(self, batch: RunBatch) -> None:
        overlapping = self._resident_models.overlapping(batch.model)
        if overlapping is not None:
            self._overlapped.start(batch, overlapping)
            return
        self._overlapped.finish()
        if batch.in_steps:
            room = self._rooms[batch.model]
            StepExecution(self._connection, self._resident_models, batch, room).run()
        else:
            self._send(run_batch(self._resident_models, batch, self._connection))

    def _ready(self) -> Ready:
        models = self._resident_models
        memory_bytes = resident_bytes()
        return Ready(
            models.device_name,
            models.setup_s,
            models.warmup_s,
            memory_bytes,
            models.changes(),
            sorted(models.overlaps),
        )

    def _send(self, message: ServerMessage) -> None:
        self._connection.sendall(encode_server_message(message))


def _exit_on_hangup(fd: int) -> None:
    """Exits immediately when the I/O process closes its end or dies."""
    poller = select.poll()
    poller.register(fd, 0)  # no events, so poll reports only hang-ups, never data
    poller.poll()
    os._exit(0)


def _backends(arguments: argparse.Namespace) -> list[Backend | None]:
    encoded = arguments.backend or ["null"] * len(arguments.model)
    return [msgspec.json.decode(text, type=Backend | None) for text in encoded]


def _makers(arguments: argparse.Namespace, threads: int) -> list[Callable[[], LoadedModel]]:
    makers: list[Callable[[], LoadedModel]] = []
    for entry, folder, backend in zip(
        arguments.model, arguments.folder, _backends(arguments), strict=True
    ):
        make = partial(
            model_for, Model.model_validate_json(entry), folder, arguments.device, backend=backend
        )
        makers.append(partial(make, threads=threads, memory_fraction=arguments.memory_fraction))
    return makers


def _resident_models(
    arguments: argparse.Namespace, loaded: Mapping[int, LoadedModel]
) -> ResidentModels:
    weights = [
        Path(backend.graph) if backend is not None and backend.graph else folder
        for folder, backend in zip(arguments.folder, _backends(arguments), strict=True)
    ]
    entries = [Model.model_validate_json(entry) for entry in arguments.model]
    return ResidentModels(
        _makers(arguments, arguments.threads),
        weights,
        arguments.memory_budget_bytes,
        loaded,
        {
            number: WORKER_TASKS[entry.task].more_weights(entry)
            for number, entry in enumerate(entries)
        },
    )


if __name__ == "__main__":
    sys.exit(main())
