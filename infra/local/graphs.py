"""Builds missing optimized graphs at the first start, while everything else starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping

from infra.local.process import Process
from shared.catalog import Catalog, Model
from shared.errors import Unavailable

MAKE_LIMIT_S = 180.0
LOOSE_COSINE = 0.999
"""INT8 graphs stay below this, so they are made only for models that tolerate it."""


def graph_commands(catalog: Catalog) -> dict[str, list[str]]:
    """The command that builds each model's graphs, by model name. Omits models without graphs."""
    wanted = {model.name: wanted_graphs(model) for model in catalog.deployed}
    return {
        name: ["workers.optimize", name, "--variants", graphs]
        for name, graphs in wanted.items()
        if graphs
    }


def wanted_graphs(model: Model) -> str:
    """The optimized graphs that a worker may choose from, as named by `workers.optimize`."""
    if not model.definition.runs_graphs or model.backend == "torch":
        return ""
    graphs = ["fp32"]
    if model.precision == "int8" or (
        model.precision == "auto" and model.tolerance.cosine < LOOSE_COSINE
    ):
        graphs += ["int8", "int8-static"]
    if model.precision in ("auto", "fp16") and shutil.which("nvidia-smi"):
        graphs.append("fp16")
    return ",".join(graphs)


def await_graphs(makers: Mapping[str, Process], tell: Callable[[str, str], None]) -> Iterator[str]:
    """Model names, as their builders end. Without graphs torch serves a model.

    Args:
        makers: running, by the model's name.
        tell: gets a word and the facts of each that is slow or fails.
    """
    for name, maker in makers.items():
        # Silent where the graphs are there from an earlier start, which takes half a second to see.
        if maker.is_running:
            tell("graphs", f"{name}: looked for, and made at the first start")
        try:
            maker.wait_done(MAKE_LIMIT_S)
        except Unavailable as error:
            maker.stop()
            tell("without", f"optimized graphs: {error.message}")
        yield name
