"""Prompts of the tiny pipeline; that the pixels are the reference's is held in test_image.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from workers.models.base import PreparedImage
from workers.models.image.model import PromptEncoder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline(tiny_folder: Path) -> Any:
    return diffusers.StableDiffusionPipeline.from_pretrained(tiny_folder, safety_checker=None)


@pytest.fixture
def rows(pipeline: Any) -> Iterator[list[int]]:
    """How many prompts each call of the text encoder had."""
    seen: list[int] = []
    hook = pipeline.text_encoder.register_forward_hook(
        lambda module, args, output: seen.append(len(args[0]))
    )
    yield seen
    hook.remove()


def item(prompt: str, negative: str = "") -> PreparedImage:
    return PreparedImage(
        key="",
        length=1,
        prompt=prompt,
        negative_prompt=negative,
        width=64,
        height=64,
        steps=1,
        guidance_scale=2.0,
        seed=0,
        scheduler="ddim",
    )


def encode(encoder: PromptEncoder, *items: PreparedImage) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return encoder.arguments(items)


def test_equal_prompts_are_encoded_once(pipeline: Any, rows: list[int]) -> None:
    encoder = PromptEncoder(pipeline)
    first = encode(encoder, item("a"), item("b"), item("a"))
    assert rows == [3]  # a, b, and the empty negative one
    assert torch.equal(first["prompt_embeds"][0], first["prompt_embeds"][2])
    again = encode(encoder, item("b"), item("c", ""))
    assert rows == [3, 1]
    assert torch.equal(again["prompt_embeds"][0], first["prompt_embeds"][1])
    assert torch.equal(again["negative_prompt_embeds"], first["negative_prompt_embeds"][:2])


def test_the_embeddings_are_the_pipelines_own(pipeline: Any) -> None:
    with torch.inference_mode():
        own = pipeline.encode_prompt(["a", "b"], "cpu", 1, True, ["x", "y"])
    ours = encode(PromptEncoder(pipeline), item("a", "x"), item("b", "y"))
    for mine, reference in zip(
        (ours["prompt_embeds"], ours["negative_prompt_embeds"]), own, strict=True
    ):
        torch.testing.assert_close(mine, reference)


def test_tokens_left_out_are_counted_in_both_prompts(pipeline: Any) -> None:
    encoder, most = PromptEncoder(pipeline), pipeline.tokenizer.model_max_length
    assert encoder.truncated_tokens(item("a", "")) == 0
    # Of the most, two are special tokens.
    assert encoder.truncated_tokens(item("a " * (most - 2))) == 0
    assert encoder.truncated_tokens(item("a " * (most + 3), "a " * (most - 1))) == 5 + 1
    cut, whole = encode(encoder, item("a " * (most + 3)), item("a " * (most - 2)))["prompt_embeds"]
    torch.testing.assert_close(cut, whole)


def test_what_was_not_used_for_longest_is_dropped(pipeline: Any, rows: list[int]) -> None:
    one_bytes = encode(PromptEncoder(pipeline), item("a"))["prompt_embeds"].nbytes
    encoder = PromptEncoder(pipeline, kept_bytes=3 * one_bytes)
    rows.clear()
    for prompt in ("a", "b", "a", "c", "a", "b"):
        encode(encoder, item(prompt))
    # "" is used by each and never dropped; "c" pushes "b" out, "b" is encoded again.
    assert rows == [2, 1, 1, 1]


def test_no_room_means_no_memory(pipeline: Any, rows: list[int]) -> None:
    encoder = PromptEncoder(pipeline, kept_bytes=0)
    encode(encoder, item("a"))
    encode(encoder, item("a"))
    assert rows == [2, 2]
