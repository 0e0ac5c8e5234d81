"""`python -m workers.model_process`: loads one model and runs the batches that its I/O process hands it over a socket.

Started by workers/model_pool.py with one end of a socket pair. It answers Ready (or Refused), then each batch in turn,
and is gone as soon as the other end is closed, even in the middle of a batch.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shared.catalogue import Model as Entry
from shared.errors import ModelFailed, PenstockError
from shared.logs import configure_logs
from shared.messages import Result
from workers.frames import Answer, Done, Failure, Progress, Ready, Refused, RunBatch, encode_answer, read_run
from workers.models import model_for
from workers.models.backend import Backend
from workers.models.base import Model, OnStep, OutOfMemory, PreparedItem

PROGRESS_EVERY_S = 0.1
_PAGE_BYTES = resource.getpagesize()

log = logging.getLogger(__name__)


def main() -> int:
    """Serves one model until the socket closes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="workers.model_process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    parser.add_argument("--model", required=True, help="the catalogue entry as JSON")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--backend", help="what computes an embedding model, as JSON; without it: torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-fraction", type=float, default=1.0)
    given = parser.parse_args()
    configure_logs("WARNING")
    # Signals to the whole group (Ctrl-C, a supervisor's TERM) are the I/O process's to obey: it drains, then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=given.fd)
    threading.Thread(target=_leave_on_hangup, args=(given.fd,), daemon=True).start()

    def answer(frame: Answer) -> None:
        connection.sendall(encode_answer(frame))

    entry = Entry.model_validate_json(given.model)
    backend = msgspec.json.decode(given.backend, type=Backend) if given.backend else None
    try:
        model = model_for(
            entry,
            given.folder,
            given.device,
            backend=backend,
            threads=given.threads,
            memory_fraction=given.memory_fraction,
        )
        answer(_start(model))
    except PenstockError as error:
        answer(Refused(error.code, error.message, error.field))
        return 2
    with connection.makefile("rb") as stream:
        while (batch := read_run(stream)) is not None:
            answer(_run(model, batch, answer))
    return 0


def _leave_on_hangup(fd: int) -> None:
    """Ends the process, whatever it does, when the I/O process has closed its end or is gone."""
    poller = select.poll()
    poller.register(fd, 0)  # asks for nothing, so only a hang-up is reported, never data
    poller.poll()
    os._exit(0)


def _start(model: Model) -> Ready:
    began = time.monotonic()
    model.setup()
    loaded = time.monotonic()
    model.warmup()
    warm = time.monotonic()
    return Ready(model.device_name, loaded - began, warm - loaded, _memory_bytes())


def _run(model: Model, batch: RunBatch, answer: Callable[[Answer], None]) -> Done:
    started_at_s, began = time.time(), time.perf_counter()
    run = _Run(model, _progress(batch.number, answer))
    run.compute(batch.items)
    inference_ms = (time.perf_counter() - began) * 1000
    return Done(
        number=batch.number,
        results=[
            Failure(outcome.code, outcome.message, outcome.field) if isinstance(outcome, PenstockError) else outcome
            for _, outcome in sorted(run.outcomes.items())
        ],
        started_at_s=started_at_s,
        finished_at_s=time.time(),
        inference_ms=inference_ms,
        real_work=sum(item.length for item in batch.items),
        padded_work=run.padded_work,
        out_of_memory=run.out_of_memory,
        memory_bytes=_memory_bytes(),
    )


def _progress(number: int, answer: Callable[[Answer], None]) -> OnStep:
    """Reports steps, but not more often than anyone wants to see."""
    last_s = time.monotonic()

    def on_step(step: int, steps: int) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= PROGRESS_EVERY_S:
            last_s = now_s
            answer(Progress(number, step, steps))

    return on_step


class _Run:
    """One batch on its way through the model, group by group; one that fails is split until the bad item is alone."""

    def __init__(self, model: Model, on_step: OnStep) -> None:
        self._model = model
        self._on_step = on_step
        self.outcomes: dict[int, Result | PenstockError] = {}
        self.padded_work = 0
        self.out_of_memory = False

    def compute(self, items: Sequence[PreparedItem]) -> None:
        """Fills `outcomes` for every place in `items`."""
        for places in self._model.groups(items):
            self._compute_group(items, places)

    def _compute_group(self, items: Sequence[PreparedItem], places: Sequence[int]) -> None:
        group = [items[place] for place in places]
        self.padded_work += max(item.length for item in group) * len(group)
        try:
            results = self._model.predict(group, self._on_step)
            if len(results) != len(group):
                raise ModelFailed(f"the model gave {len(results)} results for {len(group)} items; this is a bug")
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


def _memory_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except FileNotFoundError:  # not Linux; the peak is the nearest that is told
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())
