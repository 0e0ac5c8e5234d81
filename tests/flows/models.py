"""Small models for flows: they split a text into words, check each word, and join them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import BadInput, ModelFailed
from shared.models.catalog import Catalog, Model, flow_of
from shared.models.entry import FlowEntry
from shared.models.interface import ModelInterface
from tests.limits import WAIT_LIMIT_S

STRING = {"type": "string"}
CHECKED = {
    "type": "object",
    "properties": {"word": STRING, "flagged": {"type": "boolean"}, "size": {"type": "integer"}},
}


def class_entry(
    name: str, inputs: Mapping[str, Any], output: Mapping[str, Any], **more: Any
) -> Model:
    """A class's entry: inputs without a default are required."""
    required = [name for name, shape in inputs.items() if "default" not in shape]
    schema = {"type": "object", "properties": dict(inputs), "required": required}
    interface = ModelInterface(
        inputs=schema,
        output=dict(output),
        batches=True,
        cog_version="0.23.1",
        sources_sha256="0" * 64,
    )
    return Model.model_validate(
        {
            "name": name,
            "task": "custom",
            "source": "local:nowhere",
            "interface": interface,
            "batch": {"max_items": 8},
            "price": {"per_item_usd": 0.25},
            **more,
        }
    )


SPLIT = class_entry("split-words", {"text": STRING}, {"type": "array", "items": STRING})
CHECK = class_entry("check-word", {"word": STRING}, CHECKED, deterministic=True)
JOIN = class_entry(
    "join-words", {"words": {"type": "array", "items": STRING}}, STRING, deterministic=True
)
MODELS = (SPLIT, CHECK, JOIN)


NO_WORDS = "?!"
"""A text that can't be split."""


@dataclass
class Compute:
    """Computes the models' results and records their inputs. `gates` hold models back, by name."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    """How many times the check of each word fails."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Gates where words wait before they are checked."""
    began: set[str] = field(default_factory=set)
    """The words whose check has begun."""

    def output(self, name: str, values: Mapping[str, Any]) -> Any:
        self.asked.append((name, values))
        if name == SPLIT.name:
            if values["text"] == NO_WORDS:
                raise BadInput("text: it has no word", field="text")
            return values["text"].split()
        if name == JOIN.name:
            return " ".join(values["words"])
        word = values["word"]
        self.began.add(word)
        if word in self.gates:
            assert self.gates[word].wait(WAIT_LIMIT_S)
        if self.fails.get(word, 0) > 0:
            self.fails[word] -= 1
            raise ModelFailed(f"{word} can't be read")
        return {"word": word.upper(), "flagged": word.startswith("x"), "size": len(word)}

    def count(self, name: str) -> int:
        """The number of items that a model computed."""
        return sum(one == name for one, _ in self.asked)


def catalog_of(*flows: Mapping[str, Any], models: Sequence[Model] = MODELS) -> Catalog:
    """A catalog with these models and flows."""
    known = Catalog(tuple(models))
    return Catalog(
        tuple(models), tuple(flow_of(FlowEntry.model_validate(one), known) for one in flows)
    )
