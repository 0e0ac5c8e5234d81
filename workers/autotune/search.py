"""Chooses a backend: the fastest candidate within the tolerance of torch fp32.

Then determines the number of tokens per batch for that backend (batch_budget.py).

It waits until the cores are idle, so that other programs do not distort measurements.

A prior estimates which backend is likely to be fastest on this hardware. It orders the candidates,
rules out backends that never won, and decides if measurements disagree. Its sources are in
docs/measurements/embeddings.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import msgspec
import numpy as np

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from workers.autotune.batch_budget import BudgetTiming, find_budget
from workers.autotune.benchmark_pool import BenchmarkPool
from workers.autotune.candidates import candidates, layouts
from workers.autotune.choice import Choice, Finding, Layout
from workers.autotune.contest import LAYOUT_MARGIN, Contest, Option, Timing
from workers.autotune.hardware import Machine
from workers.models.artifact import Artifact, Calibration, read_calibration
from workers.models.backend import Backend, choose_unmeasured_backend
from workers.models.base import PreparedText
from workers.models.embedding.model_folder import read_sentence_folder

_ON_GPU = ("torch-bf16", "torch-fp16", "onnx-int8", "onnx-fp16", "onnx-fp32", "torch-fp32")
_WITH_BF16 = ("onnx-int8", "torch-bf16", "onnx-fp32", "torch-fp32")
_WITH_VNNI = ("onnx-int8", "onnx-fp32", "torch-fp32", "torch-bf16")
_PLAIN = ("onnx-fp32", "onnx-int8", "torch-fp32", "torch-bf16")
_VNNI_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})

QUIET_LIMIT_S = 10.0
"""How long to wait for the machine to become quiet, which is longer than a local stack's other
workers take to start on two cores. After that, the measurement starts anyway.
"""
_SAMPLE_S = 0.3
_SAMPLES = 2
"""Number of consecutive quiet samples required, because a starting process sometimes pauses."""
_QUIET_SHARE = 0.85

MEASURE_LIMIT_S = 10.0
"""No round starts after this time. Loading libraries takes extra time."""
BUSY_LIMIT_S = 2.0
"""The same limit for a busy machine, where rounds are likely to be disturbed."""
RATE_S = 0.5
READ_AGAIN_S = 1.0
"""Duration up to which a batch is timed twice, because the first time may include loading a GPU's
kernels. It hardly changes a longer one.
"""
ROUNDS = 2
"""Number of rounds that must agree."""
CALIBRATION_TEXTS = 40
_TOGETHER = 8
_LENGTHS = (9, 11, 60, 13, 12, 210, 10, 70, 14, 44, 12, 8, 52, 16, 11, 240, 13, 88, 10, 36)
"""Token counts of the timed texts: 60% about 12, 30% about 60, 10% about 230."""

Measure = Callable[[BenchmarkPool, Backend, Layout, Sequence[PreparedText]], Timing]
"""Measures a loaded backend's throughput in a layout with these texts."""

LIBRARY_OF = {
    "torch": "workers.models.embedding.encoder_torch",
    "onnx": "workers.models.embedding.encoder_onnx",
}

log = logging.getLogger(__name__)


def prior_rank(backend: Backend, machine: Machine, *, is_gpu: bool) -> int:
    """Returns the rank of `backend` on this hardware. 0 is likely to be the fastest."""
    if is_gpu:
        order: tuple[str, ...] = _ON_GPU
    elif machine.has_bf16:
        order = _WITH_BF16
    else:
        order = _WITH_VNNI if _VNNI_FLAGS & set(machine.flags) else _PLAIN
    kind = f"{backend.backend}-{backend.precision}"
    return order.index(kind) if kind in order else len(order)


def idle_core_s() -> float | None:
    """Returns the total idle seconds of the cores that this process may use.

    None if the system doesn't report them.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    fields = [line.split() for line in lines if line.partition(" ")[0] in ours]
    return sum(int(one[4]) + int(one[5]) for one in fields) / ticks


def await_quiet(
    cores: int,
    *,
    limit_s: float = QUIET_LIMIT_S,
    idle_s: Callable[[], float | None] = idle_core_s,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until `cores` are idle.

    Returns True once they are idle or if their state is unknown, and False after `limit_s`.

    Args:
        cores: number of cores that will be used.
    """
    began_s = before_s = clock()
    before = idle_s()
    quiet = 0
    while before is not None:
        sleep(_SAMPLE_S)
        now_s, now = clock(), idle_s()
        if now is None:
            break
        is_quiet = now - before >= _QUIET_SHARE * cores * (now_s - before_s)
        quiet = quiet + 1 if is_quiet else 0
        if quiet == _SAMPLES:
            return True
        if now_s - began_s >= limit_s:
            return False
        before, before_s = now, now_s
    return True


@dataclass(frozen=True)
class SearchSpec:
    """A search's input.

    `processes` and `threads` are 0 if undecided. `texts` are used if there is no artifact.
    `memory_fraction` is the fraction of a GPU's memory that each process may use.
    """

    entry: Model
    folder: Path
    artifact: Artifact | None
    machine: Machine
    device: str
    processes: int
    threads: int
    texts: Sequence[PreparedText]
    memory_fraction: float = 1.0

    @property
    def is_gpu(self) -> bool:
        return self.machine.computes_on_gpu(self.device)

    @property
    def has_vectors(self) -> bool:
        """False for a cross-encoder, which has a single candidate and nothing to compare."""
        return self.entry.rerank == "cosine"

    @property
    def finds_budget(self) -> bool:
        """True if the entry allows batches that are larger than usual."""
        return self.entry.batch != self.entry.usual_batch

    def forms(self, backend: Backend) -> list[Layout]:
        """Returns the layouts in which to measure `backend`, with the preferred one first."""
        return layouts(
            self.processes, self.threads, self.machine, is_gpu=self.is_gpu, backend=backend.backend
        )


def measure(
    pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
) -> Timing:
    return pool.reading(texts, backend.call_tokens, layout, RATE_S)


def choose(
    spec: SearchSpec,
    *,
    meter: Measure = measure,
    clock: Callable[[], float] = time.monotonic,
    quiet: Callable[[int], bool] = await_quiet,
) -> Choice:
    """Returns the fastest candidate within the tolerance, in its fastest layout.

    Falls back to the hardware's prior if there is too much noise.

    First loads all candidates and checks them against torch fp32, which noise does not affect. Then
    waits for quiet.

    Args:
        quiet: waits until a number of cores are idle.

    Raises:
        ConfigurationError: the entry's backend or precision is not available within its tolerance.
    """
    listed, findings = candidates(spec.entry, spec.artifact, spec.machine, is_gpu=spec.is_gpu)
    listed.sort(key=lambda backend: prior_rank(backend, spec.machine, is_gpu=spec.is_gpu))
    needed = [
        one for number, one in enumerate(listed) if not _outdone_by(one, listed[:number], spec)
    ]
    libraries = [LIBRARY_OF[name] for name in dict.fromkeys(backend.backend for backend in needed)]
    with BenchmarkPool(
        spec.entry, spec.folder, spec.device, spec.machine, libraries, spec.memory_fraction
    ) as pool:
        accuracy = _AccuracyCheck(spec, pool)
        fit = _fitting(spec, accuracy, listed, findings)
        options = [Option(backend, spec.forms(backend)[0], finding) for backend, finding in fit]
        is_open = len(options) > 1 or any(len(spec.forms(backend)) > 1 for backend, _ in fit)
        limit_s = MEASURE_LIMIT_S if not is_open or quiet(spec.machine.cores) else BUSY_LIMIT_S

        def timed(option: Option) -> Timing:
            pool.open(option.backend, option.layout)
            if not option.backend.call_tokens:
                cost = pool.call_tokens(accuracy.texts[0], accuracy.longest)
                option.backend = msgspec.structs.replace(option.backend, call_tokens=cost)
            return meter(pool, option.backend, option.layout, accuracy.mix)

        contest = Contest(timed, clock, limit_s, ROUNDS if pool.keeps_several else 1)
        choice = _decide(spec, contest, options, findings)
        if spec.finds_budget and choice.backend.call_tokens:
            _find_budget(spec, choice, pool, meter, accuracy.mix)
        return choice


def _find_budget(
    spec: SearchSpec,
    choice: Choice,
    pool: BenchmarkPool,
    meter: Measure,
    mix: Sequence[PreparedText],
) -> None:
    """Times batches in the chosen backend and layout, and adds the result to `choice`.

    If there is no result, such as when a process died, batches have the usual size for a day.
    """

    def measure_batch(tokens: int) -> BudgetTiming:
        return time_batch(pool, choice, mix, tokens, meter)

    usual = spec.entry.usual_batch.max_tokens or 0
    try:
        pool.open(choice.backend, choice.layout)
        choice.batch_tokens, choice.budgets = find_budget(
            measure_batch, usual, spec.entry.budget, spec.entry.deadline.default_s
        )
    except PenstockError as error:
        log.warning("batch size not measured", extra={"reason": error.message})
        choice.is_provisional = True


def time_batch(
    pool: BenchmarkPool,
    choice: Choice,
    mix: Sequence[PreparedText],
    tokens: int,
    meter: Measure = measure,
) -> BudgetTiming:
    """Times batches of `tokens` using the chosen backend, which is already loaded, and layout.

    Raises:
        OutOfMemory: the device has too little memory.
    """
    texts = _texts_of(mix, tokens)
    reading = meter(pool, choice.backend, choice.layout, texts)
    if choice.layout.processes * len(texts) / reading.texts_per_s <= READ_AGAIN_S:
        reading = max(reading, meter(pool, choice.backend, choice.layout, texts))
    texts_per_s = reading.texts_per_s
    total = sum(text.length for text in texts)
    return BudgetTiming(
        tokens=tokens,
        tokens_per_s=round(texts_per_s * total / len(texts), 1),
        batch_s=round(choice.layout.processes * len(texts) / texts_per_s, 6),
    )


def _texts_of(mix: Sequence[PreparedText], tokens: int) -> list[PreparedText]:
    """Returns texts from the mix with this many tokens in total, or slightly fewer."""
    again = cycle(mix)
    texts = [next(again)]
    free = tokens - texts[0].length
    while (text := next(again)).length <= free:
        texts.append(text)
        free -= text.length
    return texts


def _fitting(
    spec: SearchSpec, accuracy: _AccuracyCheck, listed: Sequence[Backend], findings: list[Finding]
) -> list[tuple[Backend, Finding]]:
    """Returns the candidates within the tolerance, with their findings.

    Appends all findings to `findings`.
    """
    fit: list[tuple[Backend, Finding]] = []
    for backend in listed:
        finding = Finding(name=backend.name)
        findings.append(finding)
        finding.reason = _outdone_by(backend, [one for one, _ in fit], spec)
        if finding.reason:
            continue
        form = spec.forms(backend)[0]
        try:
            if spec.has_vectors:
                accuracy.prepare(form)
            accuracy.pool.open(backend, form)
            if not spec.has_vectors or accuracy.is_within(finding):
                fit.append((backend, finding))
        except PenstockError as error:
            finding.reason = error.message
    return fit


def _outdone_by(backend: Backend, fit: Sequence[Backend], spec: SearchSpec) -> str:
    """Returns the reason why torch fp32 need not be measured in addition to `fit`.

    Empty if it must be measured.
    """
    if (backend.backend, backend.precision) != ("torch", "fp32"):
        return ""
    if any(one.backend == "torch" for one in fit):  # listed only if they are faster
        return "not measured: torch is faster with fewer bits"
    is_x86_cpu = "avx2" in spec.machine.flags and not spec.is_gpu
    if is_x86_cpu and any((one.backend, one.precision) == ("onnx", "fp32") for one in fit):
        return "not measured: ONNX Runtime computes fp32 faster on this CPU"
    return ""


def _decide(
    spec: SearchSpec, contest: Contest, options: Sequence[Option], findings: list[Finding]
) -> Choice:
    """Picks the winner among the backends, then among its layouts.

    Picks the first one listed if no two rounds agree.
    """
    is_alone = len(options) == 1 and len(spec.forms(options[0].backend)) > 1
    # A single backend is timed along with its layouts below.
    winner = options[0] if is_alone else contest.decide(options) if options else None
    usable = [option for option in options if not option.finding.reason]
    if not usable:
        return _without_figures(spec.entry, spec.forms(Backend())[0], findings)
    if winner is None:
        return _by_prior(usable[0], contest, findings)
    forms = spec.forms(winner.backend)
    if len(forms) > 1:
        others = [Option(winner.backend, form, winner.finding) for form in forms[1:]]
        laid_out = contest.decide([winner, *others], LAYOUT_MARGIN)
        if not winner.readings:
            return _without_figures(spec.entry, spec.forms(Backend())[0], findings)
        if laid_out is None:
            return _by_prior(winner, contest, findings)
        winner = laid_out
    rounds = f" in {contest.rounds} rounds" if contest.counted >= contest.rounds > 1 else ""
    reason = f"fastest within cosine {spec.entry.tolerance.cosine:g} of torch fp32{rounds}"
    return Choice(
        backend=winner.backend,
        layout=winner.layout,
        reason=f"{reason}: {winner.best.texts_per_s:.0f} texts/s",
        findings=findings,
    )


def _by_prior(option: Option, contest: Contest, findings: list[Finding]) -> Choice:
    rounds = contest.disturbed + contest.counted
    counts = (
        f"{contest.disturbed} of {rounds} rounds were disturbed, and no two of the others agree"
    )
    return Choice(
        backend=option.backend,
        layout=option.layout,
        reason=f"default on this hardware, not measured: {counts}",
        is_provisional=True,
        findings=findings,
    )


class _AccuracyCheck:
    """The calibration set with torch fp32's vectors, from the artifact or computed here."""

    def __init__(self, spec: SearchSpec, pool: BenchmarkPool) -> None:
        self.pool = pool
        self.longest = read_sentence_folder(spec.folder).max_length
        self._tolerance = spec.entry.tolerance.cosine
        self._calibration = _kept_calibration(spec.artifact)
        self.texts = spec.texts if self._calibration is None else self._calibration.texts
        self.mix = mix_of(self.texts, self.longest)

    def prepare(self, form: Layout) -> None:
        """Computes the reference if the artifact doesn't contain it."""
        if self._calibration is None:
            self.pool.open(Backend(), form)
            self._calibration = Calibration(self.texts, self.pool.vectors(self.texts, 1))

    def is_within(self, finding: Finding) -> bool:
        """Returns whether the loaded backend is within the tolerance. Fills in the finding."""
        assert self._calibration is not None, "prepare() was not called; this is a bug"
        vectors = self.pool.vectors(self.texts, _TOGETHER)
        cosines = _cosines(vectors, self._calibration.vectors)
        finding.cosine_min, finding.cosine_mean = float(cosines.min()), float(cosines.mean())
        if not finding.cosine_min >= self._tolerance:
            finding.reason = (
                f"minimum cosine {finding.cosine_min:.5f} is below the tolerance of "
                f"{self._tolerance:g}"
            )
        return not finding.reason


def _kept_calibration(artifact: Artifact | None) -> Calibration | None:
    """Returns evenly spaced samples of the artifact's texts."""
    if artifact is None:
        return None
    try:
        kept = read_calibration(artifact)
    except ConfigurationError as error:
        log.warning("calibration set ignored", extra={"reason": error.message})
        return None
    step = max(1, len(kept.texts) // CALIBRATION_TEXTS)
    return Calibration(kept.texts[::step], kept.vectors[::step])


def mix_of(texts: Sequence[PreparedText], longest: int) -> list[PreparedText]:
    """Returns texts of _LENGTHS tokens, cut from the concatenated texts."""
    stream = cycle(np.concatenate([np.frombuffer(text.ids, "<u4") for text in texts]).tolist())
    mix = []
    for length in _LENGTHS:
        ids = np.array(list(islice(stream, min(length, longest))), "<u4")
        mix.append(PreparedText(key="", length=len(ids), ids=ids.tobytes()))
    return mix


def _cosines(vectors: np.ndarray, reference: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return np.asarray((vectors * reference).sum(axis=1) / norms)


def _without_figures(entry: Model, layout: Layout, findings: list[Finding]) -> Choice:
    """Returns torch fp32, which is the reference, if the entry allows it."""
    reasons = "; ".join(f"{finding.name}: {finding.reason}" for finding in findings)
    if entry.precision in ("auto", "fp32") and entry.backend != "onnx":
        reason = f"no backend could be measured, so torch fp32 is used ({reasons})"
        return Choice(
            backend=choose_unmeasured_backend(entry),
            layout=layout,
            reason=reason,
            findings=findings,
        )
    raise ConfigurationError(
        f"{entry.name}: no {entry.backend} backend with precision {entry.precision} is "
        f"within its tolerance ({reasons})",
        field="backend",
    )
