"""Prints a result as text."""

from __future__ import annotations

from infra.text_table import format_transposed
from penstock_planning.simulation.result import (
    FlowSummary,
    GpuFailureSummary,
    ModelSummary,
    RunSummary,
    SimulationResult,
)

_MODEL_HEADS = (
    "model",
    "requests",
    "answered in time, share",
    "refused at once (429)",
    "deadline passed (504)",
    "lost with their region",
    "in flight at the end",
    "deadline, s",
    "answer p50, s",
    "answer p95, s",
    "answer p99, s",
    "wait for a batch p95, s",
    "replicas least",
    "replicas most",
    "replicas mean",
)

_FLOW_HEADS = (
    "flow",
    "runs",
    "answered in time",
    "answer p50, s",
    "answer p95, s",
    "GPU-seconds idle per run",
)

_GPU_HEADS = (
    "GPUs at the peak",
    "GPUs to request, by the rule of deploy plan",
    "GPUs on average",
    "GPU hours",
    "GPU busy, share of paid time",
    "workers busy, share",
    "workers' used capacity, share",
    "dollars of GPU nodes",
    "dollars a day",
)


def text(result: SimulationResult) -> str:
    """Returns a run's figures: those for each model, then those for the GPUs."""
    summary, scenario = result.summary, result.scenario
    title = [scenario.about] if scenario.about else []
    return "\n\n".join(
        [
            *title,
            format_transposed(_MODEL_HEADS, [_model_row(model) for model in summary.models]),
            *(
                [format_transposed(_FLOW_HEADS, list(map(_flow_row, summary.flows)))]
                * bool(summary.flows)
            ),
            format_transposed(_GPU_HEADS, [_gpu_row(summary)]),
            *(f"workers ended, {reason}: {count}" for reason, count in _list_lost(summary)),
            *(_failure(failure) for failure in summary.gpu_failures),
        ]
    )


def rows_of_models(result: SimulationResult) -> list[tuple[object, ...]]:
    """Returns the models' figures: a header, and a value for each model."""
    return list(zip(_MODEL_HEADS, *map(_model_row, result.summary.models), strict=True))


def rows_of_gpus(result: SimulationResult) -> list[tuple[object, ...]]:
    """Returns the GPUs' figures: a header and a value for each."""
    return list(zip(_GPU_HEADS, _gpu_row(result.summary), strict=True))


def _model_row(summary: ModelSummary) -> tuple[object, ...]:
    return (
        summary.model,
        summary.arrived,
        _round(summary.within_deadline, 5),
        summary.refused,
        summary.expired,
        summary.lost,
        summary.open,
        summary.deadline_s,
        _round(summary.p50_s, 2),
        _round(summary.p95_s, 2),
        _round(summary.p99_s, 2),
        _round(summary.queue_p95_s, 2),
        summary.replicas.least,
        summary.replicas.most,
        _round(summary.replicas.mean, 1),
    )


def _flow_row(summary: FlowSummary) -> tuple[object, ...]:
    return (
        summary.flow,
        summary.arrived,
        summary.served,
        _round(summary.p50_s, 2),
        _round(summary.p95_s, 2),
        _round(summary.gpu_idle_s_per_run, 2),
    )


def _gpu_row(summary: RunSummary) -> tuple[object, ...]:
    return (
        summary.gpus_most,
        summary.gpus_to_request,
        _round(summary.gpus_mean, 1),
        _round(summary.gpu_hours, 1),
        _round(summary.gpu_busy_share, 3),
        _round(summary.worker_busy_share, 3),
        _round(summary.worker_work_share, 3),
        _round(summary.dollars, 2),
        _round(summary.dollars_per_day, 2),
    )


def _failure(failure: GpuFailureSummary) -> str:
    times = (
        ("alert", failure.alert_s),
        ("node emptied", failure.emptied_s),
        ("all workers ready", failure.replaced_s),
    )
    after = (f"{step} {'never' if at is None else f'after {at:.0f} s'}" for step, at in times)
    return f"GPU failed at {failure.at_s:.0f} s: {', '.join(after)}"


def _list_lost(summary: RunSummary) -> list[tuple[str, int]]:
    return sorted(summary.workers_lost.items())


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
