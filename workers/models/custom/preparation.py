"""Prepares the inputs of a class of one's own. The class itself checks them once more."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import BadInput
from shared.tasks import Input
from shared.tasks.custom import CustomInput
from workers.models.base import PreparedCustom, PreparedFile


class CustomPreparer:
    """Makes PreparedCustom of CustomInput. The API has checked them by the model's interface."""

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedCustom | BadInput]:
        """One outcome per input, in order."""
        return [self._prepared(value) for value in inputs]

    def _prepared(self, value: Input) -> PreparedCustom | BadInput:
        if not isinstance(value, CustomInput):
            return BadInput("this model takes inputs as its schema says", field="input")
        files = [
            PreparedFile(place.at, place.name, file.data or b"")
            for place, file in zip(value.places, value.files, strict=True)
        ]
        return PreparedCustom(
            key="", length=1, values=value.values, files=files, is_streamed=value.is_streamed
        )
