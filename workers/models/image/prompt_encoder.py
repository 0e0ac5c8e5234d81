"""Encodes prompts before the pipeline runs.

Equal prompts are encoded once, and recent ones are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import diffusers
import torch

from workers.models.base import PreparedImage

KEPT_BYTES = 64 * 1024 * 1024
"""Device memory for the cache: 540 prompts of Stable Diffusion 1.5 in 16 bits, or 200 of SDXL."""

KNOWN = (diffusers.StableDiffusionPipeline, diffusers.StableDiffusionXLPipeline)
"""Pipelines that take encoded prompts."""

Encoded = tuple[torch.Tensor, ...]
"""One encoded prompt: hidden states [1, tokens, width], and for SDXL pooled states [1, width]."""


class PromptEncoder:
    """The text encoders of one pipeline, with an LRU cache."""

    def __init__(self, pipeline: Any, kept_bytes: int = KEPT_BYTES) -> None:
        self._pipeline = pipeline
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, Encoded] = OrderedDict()
        self._bytes = 0

    def arguments(self, items: Sequence[PreparedImage]) -> dict[str, Any]:
        """The pipeline's prompt arguments for `items`. Either all or none have a negative prompt.

        Returns:
            `prompt_embeds` and `negative_prompt_embeds` [items, tokens, width], and for SDXL the
            pooled
            ones. For pipelines with other encoders, the prompts as text.
        """
        prompts = [item.prompt for item in items]
        negatives = [item.negative_prompt for item in items]
        has_negative = bool(negatives[0])
        if type(self._pipeline) not in KNOWN:
            return {"prompt": prompts} | ({"negative_prompt": negatives} if has_negative else {})
        encoded = self._encoded([*prompts, *negatives])
        positive = [
            torch.cat(parts) for parts in zip(*(encoded[text] for text in prompts), strict=True)
        ]
        negative = [
            torch.cat(parts) for parts in zip(*(encoded[text] for text in negatives), strict=True)
        ]
        if not has_negative and self._pipeline.config.get("force_zeros_for_empty_prompt", False):
            negative = [torch.zeros_like(part) for part in positive]
        names = ("prompt_embeds", "pooled_prompt_embeds")[: len(positive)]
        return dict(zip(names, positive, strict=True)) | {
            f"negative_{name}": part for name, part in zip(names, negative, strict=True)
        }

    def truncated_tokens(self, item: PreparedImage) -> int | None:
        """How many tokens of the prompts the encoders leave out.

        None for pipelines with other encoders.
        """
        if type(self._pipeline) not in KNOWN:
            return None
        # SDXL's two tokenizers are the same. Its refiner has only the second.
        tokenizer = self._pipeline.tokenizer or self._pipeline.tokenizer_2
        texts = [text for text in (item.prompt, item.negative_prompt) if text]
        counts = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]] if texts else []
        most: int = tokenizer.model_max_length
        return sum(max(0, count - most) for count in counts)

    def _encoded(self, texts: Sequence[str]) -> dict[str, Encoded]:
        """The embeddings of all `texts`. Encodes those that are not cached in one call."""
        wanted = dict.fromkeys(texts)
        found = {text: self._kept[text] for text in wanted if text in self._kept}
        if missing := [text for text in wanted if text not in found]:
            # SD returns (states, None), and SDXL (states, None, pooled, None).
            parts = self._pipeline.encode_prompt(
                prompt=missing,
                device=self._pipeline.device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=False,
            )[::2]
            for row, text in enumerate(missing):
                found[text] = tuple(part[row : row + 1].clone() for part in parts)
        self._keep(found)
        return found

    def _keep(self, used: dict[str, Encoded]) -> None:
        for text, encoded in used.items():
            if text not in self._kept:
                self._bytes += _size_bytes(encoded)
            self._kept[text] = encoded
            self._kept.move_to_end(text)
        while self._bytes > self._kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size_bytes(dropped)


def _size_bytes(encoded: Encoded) -> int:
    return sum(part.nbytes for part in encoded)
