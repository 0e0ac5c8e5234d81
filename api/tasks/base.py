"""What a task is to the API: how the `input` of a prediction becomes items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from api.bodies import Body
from api.inputs.source_pictures import PictureCaller, SourcePictures
from shared.catalog import Model
from shared.tasks import Input


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a prediction is to compute."""

    inputs: Sequence[Input]
    shown: dict[str, Any]
    """The input as it is kept and shown. A picture inside it became the URL of a file."""
    is_list: bool
    """True if the output is a list, or its only element."""
    is_repeatable: bool
    output_format: str = "png"


class ApiTask(ABC):
    """The predictions of one task.

    shared/tasks says how a result becomes output, because webhooks show outputs too.
    """

    input_schema: ClassVar[type[Body]]
    """What an input is checked against. Clients make their forms from it."""
    output_schema: ClassVar[dict[str, Any]]
    """The output, as JSON Schema."""
    streams_tokens: ClassVar[bool] = False
    """True if its workers write tokens where a stream can read them while they compute."""

    @abstractmethod
    async def read(
        self, given: dict[str, Any], model: Model, caller: PictureCaller, pictures: SourcePictures
    ) -> Inputs:
        """Returns the items of one prediction.

        Args:
            given: the `input` of the body.
            model: that is to compute them.
            caller: who asks.
            pictures: fetches and keeps pictures that the input names.

        Raises:
            pydantic.ValidationError: something in it is wrong.
            BadInput: the model can't compute it.
        """
