"""Adapters (LoRA) that requests name by the URL of their file, within what the catalog allows.

The API fetches the file as it fetches any input by URL, and what it got has a digest from then on:
the cache, the row and the worker know the adapter by it, whatever the URL gives later. A caller who
writes `#sha256=…` behind the URL gets that file, or an error.

What a tenant has fetched is remembered for the tenant alone. So nobody gets an adapter whose URL
they can't open.
"""

from __future__ import annotations

import re

import msgspec

from api.inputs.source_images import ImageCaller, SourceImages
from api.inputs.storage import owner_of
from api.inputs.url_fetcher import FileRules
from shared.catalog import Model
from shared.errors import BadInput
from shared.tasks.image import ImageInput

FIELD = "lora_weights"
KEPT_S = 12 * 3600.0
"""For so long, a file that has not changed is not loaded again. Stored inputs stay for days."""
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})")


async def with_fetched_adapter(
    image: ImageInput, model: Model, caller: ImageCaller, images: SourceImages
) -> ImageInput:
    """Returns the image, whose adapter is fetched if it is one by URL.

    Raises:
        BadInput: it can't be had from there, or has another digest. Names `lora_weights`.
        Overloaded: too many files are being fetched.
        Unavailable: the object store is out of reach.
    """
    chosen, urls = image.adapter, model.image.adapter_urls
    if chosen is None or not chosen.url:
        return image
    assert urls is not None, "it was chosen among them; this is a bug"
    url, expected = _split(chosen.url)
    rules = FileRules(within=urls.allowed, max_bytes=urls.max_bytes, sha256=expected)
    sha256, key = await images.fetch_for_workers(url, caller, FIELD, rules, KEPT_S)
    if expected and sha256 != expected:
        raise BadInput(
            f"{FIELD}: the file there has the digest sha256={sha256}, not the one behind the #",
            field=FIELD,
        )
    digest, owner = f"sha256:{sha256}", owner_of(caller.tenant)
    adapter = msgspec.structs.replace(
        chosen, name=digest, version=digest, object_key=key, owner=owner, url=""
    )
    return msgspec.structs.replace(image, adapter=adapter)


def _split(text: str) -> tuple[str, str]:
    """The URL, and the digest behind it in hex. Empty: it has none."""
    url, _, fragment = text.partition("#")
    if not fragment:
        return url, ""
    if (digest := _DIGEST.fullmatch(fragment)) is None:
        reason = "what is behind the # is not sha256= and 64 digits of 0-9, a-f"
        raise BadInput(f"{FIELD}: {reason}", field=FIELD)
    return url, digest[1]
