"""`python -m workers.runtime.server`: loads models and runs the batches that its I/O process hands it over a socket.

It gets one end of a socket pair. It answers Ready (or Refused), then each batch in turn, and is gone as soon as the
other end is closed, even in the middle of a batch. As a rule it is forked from a template: the same program, which
loads what all processes can share and then waits to be asked for forks (workers/runtime/template_process.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from shared.catalog import Model
from shared.errors import Canceled, ModelFailed, PenstockError
from shared.logs import configure_logs
from shared.tasks import Result
from workers.models.backend import Backend
from workers.models.base import InferenceModel, OnStep, OutOfMemory, PreparedItem
from workers.runtime import memory, template_process
from workers.runtime.protocol import (
    Cancel,
    Done,
    Failure,
    Progress,
    Ready,
    Refused,
    RunBatch,
    ServerMessage,
    encode_server_message,
    read_client_message,
)
from workers.runtime.resident_models import ResidentModels
from workers.runtime.template_protocol import TemplateReady
from workers.tasks import model_for

PROGRESS_EVERY_S = 0.1
_BEGAN_S = time.monotonic()

log = logging.getLogger(__name__)


def main() -> int:
    """Serves the given models until the socket closes; returns the exit status."""
    given = _arguments()
    configure_logs("WARNING")
    # Signals to the whole group (Ctrl-C, a supervisor's TERM) are the I/O process's to obey: it drains, then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loaded: dict[int, InferenceModel] = {}
    if given.fd is None:
        loaded = _load_ahead(given)
        child = _fork_for(given, loaded)
        if child is None:
            return 0
        given.fd, given.device = child.fd, child.device
    template_process.name_process(template_process.MODEL_PROCESS_NAME)
    return serve(given, loaded)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="workers.runtime.server", description=__doc__)
    parser.add_argument("--fd", type=int, help="the inherited end of the socket pair")
    parser.add_argument("--template-fd", type=int, help="instead: where a template is asked for forks")
    parser.add_argument("--model", action="append", required=True, help="a catalog entry as JSON; may be repeated")
    parser.add_argument("--folder", action="append", type=Path, required=True, help="its files; one for each --model")
    parser.add_argument("--memory-budget-bytes", type=int, default=0, help="of all models together; 0: no bound")
    parser.add_argument("--backend", action="append", help="what computes it, as JSON; null or left out: torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-fraction", type=float, default=1.0)
    return parser.parse_args()


def _load_ahead(given: argparse.Namespace) -> dict[int, InferenceModel]:
    """Imports what the models need, and loads those that forks can share; on one thread, so that they can be forked.

    Weights are shared on a CPU, where no budget asks to drop them. A session of ONNX Runtime has threads of its own.
    """
    template_process.name_process(template_process.TEMPLATE_NAME)
    template_process.die_with_parent()
    loaded = {}
    for number, make in enumerate(_makers(given, threads=1)):
        try:
            model = make()
            backend = _backends(given)[number]
            if given.device == "cpu" and not given.memory_budget_bytes and (backend is None or not backend.graph):
                model.setup()
                loaded[number] = model
        except Exception:
            # The boundary to the model libraries. A process that is forked tries again, and says what is wrong.
            log.debug("model could not be loaded ahead", exc_info=True, extra={"model": number})
    return loaded


def _fork_for(given: argparse.Namespace, loaded: Mapping[int, InferenceModel]) -> template_process.ForkedChild | None:
    """Forks on request; returns in each forked process, and in the template, with None, at its end."""
    facts = TemplateReady(
        time.monotonic() - _BEGAN_S, len(loaded), memory.resident_bytes(), template_process.is_alone()
    )
    child = template_process.ForkServer(socket.socket(fileno=given.template_fd)).run(facts)
    if child is not None and not child.is_sound:
        template_process.start_anew(child)
    if child is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(given.threads)
    return child


def serve(given: argparse.Namespace, loaded: Mapping[int, InferenceModel]) -> int:
    """Brings the models in, answers Ready, and runs batches until the socket closes; returns the exit status."""
    connection = socket.socket(fileno=given.fd)
    threading.Thread(target=_leave_on_hangup, args=(given.fd,), daemon=True).start()

    def answer(frame: ServerMessage) -> None:
        connection.sendall(encode_server_message(frame))

    resident_models = _resident_models(given, loaded)
    try:
        resident_models.open()
    except PenstockError as error:
        answer(Refused(error.code, error.message, error.field))
        return 2
    answer(_ready(resident_models))
    while (order := read_client_message(connection)) is not None:
        if isinstance(order, RunBatch):  # else it cancels what is done already
            answer(_run(resident_models, order, _Steps(connection, order.number)))
    return 0


def _leave_on_hangup(fd: int) -> None:
    """Ends the process, whatever it does, when the I/O process has closed its end or is gone."""
    poller = select.poll()
    poller.register(fd, 0)  # asks for nothing, so only a hang-up is reported, never data
    poller.poll()
    os._exit(0)


def _backends(given: argparse.Namespace) -> list[Backend | None]:
    encoded = given.backend or ["null"] * len(given.model)
    return [msgspec.json.decode(one, type=Backend | None) for one in encoded]


def _makers(given: argparse.Namespace, threads: int) -> list[Callable[[], InferenceModel]]:
    makers: list[Callable[[], InferenceModel]] = []
    for entry, folder, backend in zip(given.model, given.folder, _backends(given), strict=True):
        make = partial(model_for, Model.model_validate_json(entry), folder, given.device, backend=backend)
        makers.append(partial(make, threads=threads, memory_fraction=given.memory_fraction))
    return makers


def _resident_models(given: argparse.Namespace, loaded: Mapping[int, InferenceModel]) -> ResidentModels:
    weights = [
        Path(backend.graph) if backend is not None and backend.graph else folder
        for folder, backend in zip(given.folder, _backends(given), strict=True)
    ]
    return ResidentModels(_makers(given, given.threads), weights, given.memory_budget_bytes, loaded)


def _ready(resident_models: ResidentModels) -> Ready:
    return Ready(
        resident_models.device_name,
        resident_models.setup_s,
        resident_models.warmup_s,
        memory.resident_bytes(),
        resident_models.changes(),
    )


def _run(resident_models: ResidentModels, batch: RunBatch, steps: _Steps) -> Done:
    try:
        model = resident_models.use(batch.model)
    except Exception as error:
        # The boundary to the model libraries, as below: a model that can't be loaded any more fails its own items.
        log.warning("model could not be loaded", exc_info=True, extra={"model": batch.model})
        return _done(resident_models, batch, time.time(), 0.0, [_as_failure(error)] * len(batch.items))
    started_at_s, began, began_cpu_s = time.time(), time.perf_counter(), time.process_time()
    run = _Run(model, steps)
    run.compute(batch.items)
    inference_ms, cpu_s = (time.perf_counter() - began) * 1000, time.process_time() - began_cpu_s
    if run.out_of_memory:
        resident_models.drop_others(keep=batch.model)  # for the next batch; this one was run in parts
    outcomes = [outcome for _, outcome in sorted(run.outcomes.items())]
    done = _done(resident_models, batch, started_at_s, inference_ms, outcomes)
    done.padded_work, done.out_of_memory, done.steps_saved = run.padded_work, run.out_of_memory, steps.saved
    done.cpu_s = cpu_s
    return done


def _done(
    resident_models: ResidentModels,
    batch: RunBatch,
    started_at_s: float,
    inference_ms: float,
    outcomes: Sequence[Result | PenstockError],
) -> Done:
    return Done(
        number=batch.number,
        results=[
            Failure(outcome.code, outcome.message, outcome.field) if isinstance(outcome, PenstockError) else outcome
            for outcome in outcomes
        ],
        started_at_s=started_at_s,
        finished_at_s=time.time(),
        inference_ms=inference_ms,
        real_work=sum(item.length for item in batch.items),
        padded_work=0,
        out_of_memory=False,
        memory_bytes=memory.resident_bytes(),
        residency=resident_models.changes(),
    )


class _Steps:
    """What a model calls after each step of batch `number`: tells how far it is, and ends it where it is canceled.

    The socket is looked at here, between two steps, and not by a thread of its own, for which every batch would wait.
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        self._connection = connection
        self._number = number
        self._told_s = time.monotonic()
        self.saved: int | None = None

    def __call__(self, step: int, steps: int) -> None:
        # After the last step too: what follows, decoding and encoding, takes as long as several steps.
        if self._is_canceled():
            self.saved = steps - step
            raise Canceled
        if (now_s := time.monotonic()) - self._told_s >= PROGRESS_EVERY_S:  # not more often than anyone wants to see
            self._told_s = now_s
            self._connection.sendall(encode_server_message(Progress(self._number, step, steps)))

    def _is_canceled(self) -> bool:
        while select.select([self._connection], [], [], 0)[0]:
            order = read_client_message(self._connection)
            # While a batch runs nothing comes but its Cancel, late ones of others, and the end of the connection.
            if not isinstance(order, Cancel) or order.number == self._number:
                return True
        return False


class _Run:
    """One batch on its way through the model, group by group; one that fails is split until the bad item is alone."""

    def __init__(self, model: InferenceModel, on_step: OnStep) -> None:
        self._model = model
        self._on_step = on_step
        self.outcomes: dict[int, Result | PenstockError] = {}
        self.padded_work = 0
        self.out_of_memory = False

    def compute(self, items: Sequence[PreparedItem]) -> None:
        """Fills `outcomes` for every place in `items`."""
        try:
            for places in self._model.groups(items):
                self._compute_group(items, places)
        except Canceled as error:
            for place in range(len(items)):
                self.outcomes.setdefault(place, error)

    def _compute_group(self, items: Sequence[PreparedItem], places: Sequence[int]) -> None:
        group = [items[place] for place in places]
        lengths = [item.length for item in group]
        self.padded_work += self._model.computed_work(lengths)
        try:
            results = self._model.predict(group, self._on_step)
            if len(results) != len(group):
                raise ModelFailed(f"the model gave {len(results)} results for {len(group)} items; this is a bug")
        except Canceled:
            raise
        except Exception as error:
            # The boundary to the model libraries: whatever they raise fails items, never the process.
            self.out_of_memory |= isinstance(error, OutOfMemory)
            log.warning("batch failed", exc_info=True, extra={"items": len(group)})
            if len(group) == 1:
                self.outcomes[places[0]] = _as_failure(error)
                return
        else:
            self.outcomes.update(zip(places, results, strict=True))
            return
        middle = len(places) // 2
        self._compute_group(items, places[:middle])
        self._compute_group(items, places[middle:])


def _as_failure(error: Exception) -> PenstockError:
    return error if isinstance(error, PenstockError) else ModelFailed(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
