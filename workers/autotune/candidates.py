"""The candidates for a model on this machine: backends, and layouts of processes and threads."""

from __future__ import annotations

from shared.models.catalog import Model
from workers.autotune.choice import Finding, Layout
from workers.autotune.hardware import Machine
from workers.models.artifact import Artifact, Variant
from workers.models.backend import Backend

CPU_PROCESSES_MAX = 4
"""Maximum number of processes, each of which holds the model's weights. Beyond four, adding threads
works just as well.
"""


LONE_THREADS_MAX = 8
"""Maximum number of threads for ONNX Runtime. More threads don't speed up the matrix products for a
single short text.
"""


def candidates(
    entry: Model, artifact: Artifact | None, machine: Machine, *, is_gpu: bool
) -> tuple[list[Backend], list[Finding]]:
    """Returns the backends that the entry, artifact, and machine allow, and findings on the others.

    Backends that are likely to be faster come first.
    """
    listed, left_out = list[Backend](), []
    if artifact is not None and entry.backend != "torch":
        for variant in sorted(
            artifact.manifest.variants, key=lambda variant: -variant.relative_speed
        ):
            if variant.backend != "onnx" or entry.precision not in ("auto", variant.precision):
                continue
            if variant.cosine_min < entry.tolerance.cosine:
                left_out.append(_beyond(variant, entry.tolerance.cosine))
                continue
            if variant.precision == "fp16" and not is_gpu:
                continue
            graph = str(artifact.graph(variant).resolve())
            listed.append(
                Backend(
                    backend="onnx", precision=variant.precision, variant=variant.name, graph=graph
                )
            )
    of_torch = [] if entry.backend == "onnx" else _torch(entry, machine, is_gpu=is_gpu)
    return [*of_torch, *listed] if is_gpu else [*listed, *of_torch], left_out


def _beyond(variant: Variant, tolerance: float) -> Finding:
    return Finding(
        name=variant.name,
        cosine_min=variant.cosine_min,
        cosine_mean=variant.cosine_mean,
        reason=(
            f"minimum cosine found during optimization is {variant.cosine_min:.5f}, but the "
            f"tolerance is {tolerance:g}"
        ),
    )


def _torch(entry: Model, machine: Machine, *, is_gpu: bool) -> list[Backend]:
    """Returns torch in the entry's precision, or in every precision the device supports."""
    precisions: list[str] = [entry.precision]
    if entry.rerank == "cross-encoder":
        precisions = ["fp32" if entry.precision == "auto" else entry.precision]
    elif entry.precision == "auto":
        precisions = (
            ["bf16", "fp16", "fp32"]
            if is_gpu
            else ["bf16", "fp32"]
            if machine.has_bf16
            else ["fp32"]
        )
    return [
        Backend(precision=precision)
        for precision in ("bf16", "fp16", "fp32")
        if precision in precisions
    ]


def choose_layout(
    processes: int, threads: int, machine: Machine, *, is_gpu: bool, backend: str = "torch"
) -> Layout:
    """Returns the number of processes and threads for an embedding model.

    Given values (not 0) are kept.

    On a GPU, threads don't matter, and multiple processes would have to share the GPU's time, so
    the default is one process per GPU. ONNX Runtime's threads sleep while they wait, so every
    process can have one per core: a single batch uses all of them, and under load the processes
    share them at little cost. Torch's threads spin, so its processes divide the cores.
    """
    cores = machine.cores
    if is_gpu:
        return Layout(processes or max(1, len(machine.gpus)), threads or 1)
    many = processes or max(1, min(CPU_PROCESSES_MAX, cores // (threads or 1)))
    part = _part(cores, many)
    return Layout(
        many, threads or (max(min(cores, LONE_THREADS_MAX), part) if backend == "onnx" else part)
    )


def choose_unmeasured_layout(
    processes: int, threads: int, machine: Machine, *, is_wide: bool
) -> Layout:
    """Returns the layout for a model that isn't measured. Any values given (not 0) are kept.

    Args:
        processes: 0 means as many as the cores allow, with the resulting number of threads.
        is_wide: True if the processes divide all cores. Otherwise, each has one thread.
    """
    if threads:
        return Layout(processes, threads)
    return Layout(processes, _part(machine.cores, max(1, processes)) if is_wide else 1)


def choose_shared_layout(layout: Layout, machine: Machine) -> Layout:
    """Returns the layout for several models, the first of which was measured in `layout`.

    torch may run one of the other models, so the processes divide the cores.
    """
    return Layout(
        layout.processes, min(layout.threads, _part(machine.cores, max(1, layout.processes)))
    )


def _part(cores: int, processes: int) -> int:
    return max(1, cores // processes)
