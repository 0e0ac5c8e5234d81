"""Prepares a custom class's inputs. The class itself checks them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.errors import BadInput, ModelFailed
from shared.models.blob import FILE_FORMAT
from shared.models.catalog import Model
from shared.models.tasks import Input
from shared.models.tasks.custom import JSON_TYPE, CustomInput, FilePlace, interface_of
from workers.models.base import PreparedCustom, PreparedFile
from workers.models.custom.aside import AsideClass

MAX_KEY_CHARS = 64
"""Maximum key length. If a value is longer, its key is the value's digest."""


class CustomPreparer:
    """Creates PreparedCustom from CustomInput, which the API has already validated.

    Args:
        weigher: returns an input's work. If None, every input counts as 1.
    """

    def __init__(self, entry: Model, weigher: AsideClass | None = None) -> None:
        self._weigher = weigher
        self._key = entry.batch.key
        self._properties = interface_of(entry).properties

    def prepare(self, inputs: Sequence[Input]) -> list[PreparedCustom | BadInput | ModelFailed]:
        """Returns one outcome per input, in order."""
        return [self._prepare_input(value) for value in inputs]

    def _prepare_input(self, value: Input) -> PreparedCustom | BadInput | ModelFailed:
        if not isinstance(value, CustomInput):
            return BadInput("inputs must match the model's schema", field="input")
        values, files = dict(value.values), []
        for place, file in zip(value.places, value.files, strict=True):
            # Large JSON is parsed in the class's process, because parsing it is slow.
            is_json = file.media_type == JSON_TYPE and self._is_value(place)
            data = file.data or (b"null" if is_json else b"")
            files.append(PreparedFile(place.at, place.name, data, is_json))
        prepared = PreparedCustom(
            key=self._key_of(values, files),
            length=1,
            values=values,
            files=files,
            is_streamed=value.is_streamed,
            context=value.context,
        )
        if self._weigher is not None:
            try:
                prepared.length = self._weigher.weigh(prepared)
            except (BadInput, ModelFailed) as error:
                return error
        return prepared

    def _is_value(self, place: FilePlace) -> bool:
        """True for an input that isn't a file but whose JSON was too large for a message."""
        shape = self._properties.get(str(place.at[0]), {})
        return len(place.at) == 1 and shape.get("format") != FILE_FORMAT

    def _key_of(self, values: Mapping[str, Any], files: Sequence[PreparedFile]) -> str:
        """Returns the value that a batch's items share: an input's value, or an empty string."""
        if self._key is None:
            return ""
        value = values.get(self._key, self._properties[self._key].get("default"))
        for file in files:
            if file.is_json and file.at == [self._key]:
                value = msgspec.json.decode(file.data)
        written = json.dumps(value, sort_keys=True)
        if len(written) <= MAX_KEY_CHARS:
            return written
        return hashlib.blake2b(written.encode(), digest_size=MAX_KEY_CHARS // 2).hexdigest()
