"""What a signed link names: an object, or an image inside a prediction's record; in the format that the link says."""

from __future__ import annotations

import re

from api.errors import NotFound
from api.parts import Parts
from api.pictures import MEDIA_TYPES
from shared.errors import BadInput

OBJECT_LIMIT_BYTES = 64 * 1024 * 1024
_INLINE = re.compile(r"predictions/([A-Za-z0-9_]{1,64})/(\d{1,3})\.png")
_FORMATS = {media_type: name for name, media_type in MEDIA_TYPES.items()}


async def fetch(parts: Parts, key: str, media_type: str) -> bytes:
    """The bytes behind a link whose signature was checked.

    Raises:
        NotFound: there is nothing, any more.
        Unavailable: Redis or the object store is out of reach.
    """
    try:
        if inline := _INLINE.fullmatch(key):
            data = await parts.predictions.inline_image(inline[1], int(inline[2]))
        else:
            data = await parts.objects.get(key, OBJECT_LIMIT_BYTES)
    except BadInput as error:
        raise NotFound("the image is no longer there") from error
    # Workers give PNG. Drawn again in another format at each fetch, it needs no second place to lie.
    if key.endswith(".png") and media_type in _FORMATS:
        return await parts.studio.encode(data, _FORMATS[media_type], None)
    return data
