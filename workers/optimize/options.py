"""The options of `penstock optimize`, and the variants by name."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Literal

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from workers.models.artifact import Manifest
from workers.tasks import WORKER_TASKS

Calibration = Literal["minmax", "entropy", "percentile"]


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions:
    """The command-line options.

    `variants`: variant names known to the task. If empty, the usual variants are used. `tolerance`:
    minimum cosine (for images, PSNR in dB), overriding the catalog's. `prune_neurons`,
    `prune_heads`: the fraction to cut, 0 to
    1. `calibration`: how int8-static chooses its ranges. `threads`: number of threads for the
    reference and every variant.
    """

    variants: tuple[str, ...] = ()
    tolerance: float | None = None
    prune_neurons: float = 0.0
    prune_heads: float = 0.0
    calibration: Calibration = "minmax"
    threads: int = 1


def choose_variants(entry: Model, options: OptimizeOptions) -> tuple[str, ...]:
    """Returns the variants to try, in the task's order.

    Raises:
        ConfigurationError: a variant is unknown for this task, or pruning was requested without a
            fraction to cut.
    """
    known = WORKER_TASKS[entry.task].variants
    unknown = [name for name in options.variants if name not in known]
    if unknown:
        raise ConfigurationError(
            f"{entry.task} models have no variant {', '.join(unknown)}; use {', '.join(known)}",
            field="variants",
        )
    cuts = options.prune_neurons > 0 or options.prune_heads > 0
    if "pruned" in options.variants and not cuts:
        raise ConfigurationError("variant pruned requires --prune or --prune-heads", field="prune")
    wanted = options.variants or _usual(entry, cuts)
    return tuple(name for name in known if name in wanted)


def missing_variants(
    manifest: Manifest, wanted: tuple[str, ...], tolerance: float
) -> tuple[str, ...]:
    """Returns missing variants, except variants that failed with this tolerance or a looser one."""
    existing = {variant.name for variant in manifest.variants}
    prefix = WORKER_TASKS[manifest.task].variant_prefix

    def is_missing(name: str) -> bool:
        return f"{prefix}-{name}" not in existing and tolerance < manifest.refused.get(
            f"{prefix}-{name}", math.inf
        )

    return tuple(name for name in wanted if is_missing(name))


def _usual(entry: Model, cuts: bool) -> tuple[str, ...]:
    has_gpu = shutil.which("nvidia-smi") is not None
    return WORKER_TASKS[entry.task].usual_variants(has_gpu=has_gpu, cuts=cuts)


def tolerance_of(entry: Model, options: OptimizeOptions) -> float:
    """Returns the minimum cosine, or PSNR in dB, that a variant must reach."""
    if options.tolerance is not None:
        return options.tolerance
    return entry.result_tolerance
