"""The API's interface to a task: converts a prediction's `input` to items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from api.bodies import Body
from api.inputs.source_images import ImageCaller, SourceImages
from shared.errors import PenstockError
from shared.models.catalog import Model
from shared.models.tasks import Input, Result

StreamKind = Literal["", "text", "items"]
Typed = TypeVar("Typed")


@dataclass(frozen=True, slots=True)
class Inputs:
    """A prediction's inputs."""

    inputs: Sequence[Input]
    raw_input: dict[str, Any]
    """The input as stored and shown, with each image replaced by a file's URL."""
    is_list: bool
    """True if the output is a list; False if it is a single element."""
    is_repeatable: bool
    output_format: str = "png"
    upscale: int | None = None
    """Factor by which to enlarge images, or None to leave them as they are."""


def check_results(results: Iterable[Result | None], kind: type[Typed], model: Model) -> list[Typed]:
    """Returns the results after checking that all of them have type `kind`."""
    typed = []
    for result in results:
        if not isinstance(result, kind):
            raise PenstockError(f"{model.name} returned a result of the wrong type; this is a bug")
        typed.append(result)
    return typed


class ApiTask(ABC):
    """One task's predictions.

    shared/models/tasks defines how a result becomes output, because webhooks also show outputs.
    """

    input_schema: ClassVar[type[Body]]
    """The input schema. Clients use it to build their forms."""
    output_schema: ClassVar[dict[str, Any]]
    """The output, as JSON Schema."""

    def input_schema_of(self, model: Model) -> dict[str, Any]:
        """Returns a model's input as JSON Schema."""
        return self.input_schema.model_json_schema(ref_template="#/components/schemas/{model}")

    def output_schema_of(self, model: Model) -> dict[str, Any]:
        """Returns a model's output as JSON Schema."""
        return self.output_schema

    def streams(self, model: Model) -> StreamKind:
        """Returns the format in which workers write partial output to Redis for streaming.

        Empty: nothing is written until the output is complete. `text`: piece by piece. `items`: one
        line of JSON per element.
        """
        return ""

    @abstractmethod
    async def read(
        self, raw_input: dict[str, Any], model: Model, caller: ImageCaller, images: SourceImages
    ) -> Inputs:
        """Returns one prediction's items.

        Args:
            raw_input: the body's `input`.
            images: fetches and stores images the input refers to.

        Raises:
            pydantic.ValidationError: a field is invalid.
            BadInput: the model can't run on this input.
        """
