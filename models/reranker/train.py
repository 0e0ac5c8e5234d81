"""`python train.py --data FILE --start FOLDER --out FOLDER`: trains a cross-encoder on MiniLM.

A cross-encoder reads query and document together and returns one number for how well the document
answers. It starts from the weights of all-MiniLM-L6-v2 and learns from pairs (`data.py`) to pick
the true document among eight: the true one and seven others that MiniLM's cosine also ranks high (a
softmax over the eight; van den Oord et al. 2018). Two variants are trained one after the other:

- `full` changes all weights.
- `low_rank` keeps MiniLM and learns small additional matrices (LoRA, Hu et al. 2021), so
  its file is small and is merged with MiniLM before use (`merge.py`).

After each epoch the model reorders the validation split's candidates, and the best epoch is kept.
Only that epoch is evaluated on the test split, which shares no packages with the others. The report
contains the MRR at 20 after reordering the 50 nearest documents by cosine, with its bootstrap
error; for comparison, it also has the MRR for cosine itself and for MaxSim over MiniLM's token
states (Khattab and Zaharia 2020).

It stops after `--minutes`. It needs torch, transformers, tokenizers, safetensors and numpy, and
nothing from this repository.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import BertForSequenceClassification

MAX_QUERY_TOKENS, MAX_DOCUMENT_TOKENS = 48, 200
CANDIDATES = 50
"""Documents reordered per query: the nearest ones by MiniLM's cosine."""
CUTOFF = 20
NEGATIVES = 7
MAX_LIKENESS = 0.92
"""A document closer than this to the true one may also be right, so it is not a negative."""
RANK = 32
PART_BYTES = 14_000_000
TEST_S = 20
"""Seconds reserved for testing a variant, out of its total minutes."""
_ADAPTED = ("query", "key", "value", "dense")


@dataclass(frozen=True)
class Split:
    """Pairs of one split as token ids; document i answers query i."""

    packages: list[str]
    queries: list[list[int]]
    documents: list[list[int]]


@dataclass(frozen=True)
class Candidates:
    """For each query, the nearest documents of its split, with their cosines."""

    asked: np.ndarray
    documents: np.ndarray
    cosines: np.ndarray


@dataclass(frozen=True)
class TrainingPlan:
    """Settings for training one variant."""

    lr: float
    epochs: int = 4
    warmup: float = 0.06


PLANS = {"full": TrainingPlan(lr=8e-5), "low_rank": TrainingPlan(lr=1e-3)}


@dataclass
class TrainingRun:
    """Result of training a variant: weights of the best epoch, and validation of every epoch."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    best: float = -1.0
    epochs: list[dict[str, float]] = field(default_factory=list)


class LowRank(torch.nn.Module):
    """A frozen linear layer, plus a trained product of two small matrices."""

    def __init__(self, kept: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.kept = kept
        self.down = torch.nn.Parameter(torch.randn(rank, kept.in_features) / kept.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(kept.out_features, rank))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Maps states [..., in] to [..., out]."""
        low = functional.linear(functional.linear(states, self.down), self.up)
        result: torch.Tensor = self.kept(states) + low
        return result


def adapt(model: Any, rank: int) -> None:
    """Freezes the encoder, and wraps each of its linear layers in a LowRank."""
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    for name, module in list(model.bert.encoder.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and child_name in _ADAPTED:
                setattr(module, child_name, LowRank(child, rank))
        if name.endswith("LayerNorm"):
            module.requires_grad_(True)
    model.bert.pooler.requires_grad_(True)


def trained_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns the trainable tensors, on the CPU."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def read(path: Path, tokenizer: Tokenizer, limit: int | None) -> dict[str, Split]:
    """Reads the file written by data.py, at most `limit` pairs per split."""
    lines: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            lines[line["split"]].append(line)
    splits = {}
    for name, members in lines.items():
        if limit is not None:
            members = members[:: max(1, len(members) // limit)][:limit]
        splits[name] = Split(
            [member["package"] for member in members],
            _tokens(tokenizer, [member["query"] for member in members], MAX_QUERY_TOKENS),
            _tokens(tokenizer, [member["document"] for member in members], MAX_DOCUMENT_TOKENS),
        )
    return splits


def _tokens(tokenizer: Tokenizer, texts: list[str], limit: int) -> list[list[int]]:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids[:limit] for encoding in encoded]


class Reader:
    """Runs the model over texts of mixed lengths, in chunks of about equal length."""

    def __init__(self, tokenizer: Tokenizer, device: str, chunk: int) -> None:
        self.device, self.chunk = device, chunk
        self._begin, self._end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))

    def autocast(self) -> torch.autocast:
        """Returns the mixed-precision context: bfloat16 on a GPU, nothing on a CPU."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")

    def chunks(
        self, firsts: Sequence[list[int]], seconds: Sequence[list[int]] | None = None
    ) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
        """Yields the indexes of a chunk's texts and the model's inputs, shortest first."""
        rows = [[self._begin, *first, self._end] for first in firsts]
        starts = [len(row) for row in rows]
        if seconds is not None:
            rows = [[*row, *second, self._end] for row, second in zip(rows, seconds, strict=True)]
        order = np.argsort([len(row) for row in rows], kind="stable")
        for at in range(0, len(order), self.chunk):
            places = order[at : at + self.chunk]
            width = -(-len(rows[places[-1]]) // 16) * 16
            ids, mask, types = (np.zeros((len(places), width), np.int64) for _ in range(3))
            for line, place in enumerate(places):
                length = len(rows[place])
                ids[line, :length] = rows[place]
                mask[line, :length] = 1
                types[line, starts[place] : length] = 1
            names = ("input_ids", "attention_mask", "token_type_ids")
            yield (
                places,
                {
                    name: torch.from_numpy(array).to(self.device, non_blocking=True)
                    for name, array in zip(names, (ids, mask, types), strict=True)
                },
            )

    def scores(
        self, model: Any, queries: Sequence[list[int]], documents: Sequence[list[int]]
    ) -> torch.Tensor:
        """Returns the model's score for each query with its document, float32 [pairs]."""
        parts, order = [], []
        for places, inputs in self.chunks(queries, documents):
            with self.autocast():
                parts.append(model(**inputs).logits[:, 0].float())
            order.append(places)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(self.device)
        return torch.cat(parts)[back]

    @torch.inference_mode()
    def states(self, encoder: Any, texts: Sequence[list[int]]) -> list[torch.Tensor]:
        """Returns the unit token states of each text, [tokens, width]."""
        result: list[Any] = [None] * len(texts)
        for places, inputs in self.chunks(texts):
            with self.autocast():
                states = encoder(**inputs).last_hidden_state.float()
            for line, place in enumerate(places):
                result[place] = functional.normalize(
                    states[line, : len(texts[place]) + 2], dim=-1
                ).to(torch.float16 if self.device == "cuda" else torch.float32)
        return result

    @torch.inference_mode()
    def vectors(self, encoder: Any, texts: Sequence[list[int]]) -> torch.Tensor:
        """Returns unit vectors, pooled like all-MiniLM-L6-v2 by means of states, [texts, width]."""
        parts, order = [], []
        for places, inputs in self.chunks(texts):
            with self.autocast():
                states = encoder(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"].unsqueeze(-1)
            parts.append(functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
            order.append(places)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(self.device)
        return torch.cat(parts)[back]


@torch.inference_mode()
def mine(reader: Reader, encoder: Any, split: Split, asked: int, *, train: bool) -> Candidates:
    """Returns the nearest documents of up to `asked` queries, evenly sampled from the split.

    For training, a query's own document and near duplicates of it are excluded.
    """
    queries = reader.vectors(encoder, split.queries)
    documents = reader.vectors(encoder, split.documents)
    step = max(1.0, len(split.queries) / asked)
    places = np.unique((np.arange(0, len(split.queries), step)).astype(np.int64))
    count = min(CANDIDATES, len(split.documents))
    nearest, cosines = [], []
    for at in range(0, len(places), 512):
        rows = torch.from_numpy(places[at : at + 512]).to(documents.device)
        likeness = queries[rows] @ documents.T
        if train:
            likeness[documents[rows] @ documents.T > MAX_LIKENESS] = -2.0
        top = likeness.topk(count, dim=1)
        nearest.append(top.indices.cpu().numpy())
        cosines.append(top.values.cpu().numpy())
    return Candidates(places, np.concatenate(nearest), np.concatenate(cosines))


def reciprocal_ranks(candidates: Candidates, scores: np.ndarray) -> np.ndarray:
    """Returns 1 / rank of each query's own document, 0 if it is not among the first ones.

    Documents with equal scores count as ranked before it.
    """
    own = candidates.documents == candidates.asked[:, None]
    true = np.where(own, scores, -np.inf).max(1)
    rank = (scores >= true[:, None]).sum(1)
    return np.where(own.any(1) & (rank <= CUTOFF), 1 / np.maximum(rank, 1), 0.0)


@torch.inference_mode()
def rerank(reader: Reader, model: Any, split: Split, candidates: Candidates) -> np.ndarray:
    """Returns the cross-encoder's score of each candidate, [queries, candidates]."""
    model.eval()
    parts = []
    for at in range(0, len(candidates.asked), 64):
        rows = candidates.documents[at : at + 64]
        query_places = np.repeat(candidates.asked[at : at + 64], rows.shape[1])
        scores = reader.scores(
            model,
            [split.queries[place] for place in query_places],
            [split.documents[place] for place in rows.ravel()],
        )
        parts.append(scores.cpu().numpy().reshape(rows.shape))
    return np.concatenate(parts)


@torch.inference_mode()
def maxsim(reader: Reader, encoder: Any, split: Split, candidates: Candidates) -> np.ndarray:
    """Returns each candidate's MaxSim score: the mean, over query tokens, of the nearest token."""
    queries = reader.states(encoder, [split.queries[place] for place in candidates.asked])
    documents = reader.states(encoder, split.documents)
    result = np.zeros(candidates.documents.shape, np.float32)
    for line, rows in enumerate(candidates.documents):
        padded = torch.nn.utils.rnn.pad_sequence([documents[place] for place in rows], True, 0.0)
        likeness = torch.einsum("qw,dtw->dqt", queries[line], padded)
        result[line] = likeness.amax(2).float().mean(1).cpu().numpy()
    return result


def measured(ranks: np.ndarray, other: np.ndarray, seed: int = 41) -> dict[str, float]:
    """Returns the mean of `ranks`, the mean improvement over `other`, and bootstrap errors."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(ranks), (2000, len(ranks)))
    gains = ranks - other
    return {
        "mrr": round(float(ranks.mean()), 4),
        "error": round(float(ranks[draws].mean(1).std()), 4),
        "gain": round(float(gains.mean()), 4),
        "gain_error": round(float(gains[draws].mean(1).std()), 4),
    }


def train(
    reader: Reader,
    model: Any,
    splits: dict[str, Split],
    candidates: dict[str, Candidates],
    plan: TrainingPlan,
    queries: int,
    until: float,
    say: Callable[[str], None],
) -> TrainingRun:
    """Trains until all epochs are done or time.monotonic() reaches `until`; keeps the best epoch.

    Each step uses `queries` queries.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.lr, weight_decay=0.01)
    rng = np.random.default_rng(41)
    began, mined, run = time.monotonic(), candidates["train"], TrainingRun()
    steps = max(1, len(mined.asked) // queries)
    for epoch in range(plan.epochs):
        model.train()
        order = rng.permutation(len(mined.asked))
        for step in range(steps):
            done = max(
                (epoch * steps + step) / (plan.epochs * steps),
                (time.monotonic() - began) / max(1.0, until - began),
            )
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * min(1.0, done / plan.warmup + 0.01, (1 - done) * 1.06)
            lines = order[step * queries : (step + 1) * queries]
            loss = _loss(reader, model, splits["train"], mined, lines, rng)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if step % 100 == 0:
                say(f"epoch {epoch} step {step} of {steps}: loss {loss.item():.4f}")
        _validate(reader, model, splits, candidates, run, say)
        if done >= 1:
            break
    return run


def _loss(
    reader: Reader,
    model: Any,
    split: Split,
    mined: Candidates,
    lines: np.ndarray,
    rng: np.random.Generator,
) -> torch.Tensor:
    count = min(NEGATIVES, mined.documents.shape[1] - 1)
    queries, documents = [], []
    for line in lines:
        own = mined.asked[line]
        wrong = mined.documents[line][mined.cosines[line] > -1.5]
        # If all documents are alike, any other one will do.
        wrong = wrong if len(wrong) else mined.documents[line][mined.documents[line] != own]
        wrong = rng.choice(wrong, count, replace=len(wrong) < count)
        for document in (own, *wrong):
            queries.append(split.queries[own])
            documents.append(split.documents[document])
    scores = reader.scores(model, queries, documents).view(len(lines), count + 1)
    first = torch.zeros(len(lines), dtype=torch.long, device=scores.device)
    return functional.cross_entropy(scores, first)


def _validate(
    reader: Reader,
    model: Any,
    splits: dict[str, Split],
    candidates: dict[str, Candidates],
    run: TrainingRun,
    say: Callable[[str], None],
) -> None:
    held = candidates["validation"]
    ranks = reciprocal_ranks(held, rerank(reader, model, splits["validation"], held))
    run.epochs.append(measured(ranks, reciprocal_ranks(held, held.cosines)))
    say(f"validation: {run.epochs[-1]}")
    if run.epochs[-1]["mrr"] > run.best:
        run.best, run.weights = run.epochs[-1]["mrr"], trained_tensors(model)


def write_full(out: Path, model: Any) -> None:
    """Writes all weights in fp16 as one safetensors file, split into parts to join with cat."""
    tensors = {
        name: tensor.to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }
    data = save(tensors, {"format": "pt"})
    for part in range(math.ceil(len(data) / PART_BYTES)):
        piece = data[part * PART_BYTES : (part + 1) * PART_BYTES]
        (out / f"model.safetensors.{part}").write_bytes(piece)


def write_low_rank(out: Path, run: TrainingRun) -> None:
    """Writes the low-rank weights in fp16."""
    tensors = {name: tensor.to(torch.float16) for name, tensor in run.weights.items()}
    (out / "adapter.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def main() -> None:
    """Trains the variants and writes their weights and metrics.json."""
    arguments = _arguments()
    began = time.monotonic()
    torch.manual_seed(41)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(arguments.start / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    splits = read(arguments.data, tokenizer, arguments.limit)
    say("pairs: " + ", ".join(f"{name} {len(split.queries)}" for name, split in splits.items()))
    start = BertForSequenceClassification.from_pretrained(arguments.start, num_labels=1)
    start = start.float().to(device).eval()
    reader = Reader(tokenizer, device, arguments.chunk)
    query_counts = {"train": 10**9, "validation": 1000, "test": 4000}
    candidates = {
        name: mine(reader, start.bert, split, query_counts[name], train=name == "train")
        for name, split in splits.items()
    }
    say("mined")
    metrics = _without_training(reader, start.bert, splits, candidates["test"])
    say(f"test: {metrics['test']}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, variant in enumerate(arguments.variants):
        variants_left = len(arguments.variants) - number
        now = time.monotonic()
        until = (
            now + (began + arguments.minutes * 60 - now - TEST_S * variants_left) / variants_left
        )
        model = copy.deepcopy(start)
        if variant == "low_rank":
            adapt(model, RANK)
        model.to(device)
        plan = PLANS[variant]
        run = train(reader, model, splits, candidates, plan, arguments.queries, until, say)
        model.load_state_dict(run.weights, strict=False)
        metrics["test"][variant] = _test(reader, model, splits["test"], candidates["test"])
        say(f"{variant}, test: {metrics['test'][variant]}")
        _write(arguments.out, variant, model, run)
        metrics[variant] = {"epochs": run.epochs, "plan": vars(plan)}
        metrics["seconds"] = round(time.monotonic() - began, 1)
        (arguments.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


def _without_training(
    reader: Reader, encoder: Any, splits: dict[str, Split], test: Candidates
) -> dict[str, Any]:
    """Returns the metrics of cosine and MaxSim, and the data they were measured on."""
    cosine = reciprocal_ranks(test, test.cosines)
    nearest_tokens = reciprocal_ranks(test, maxsim(reader, encoder, splits["test"], test))
    on_gpu = reader.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "pairs": {name: len(split.queries) for name, split in splits.items()},
        "packages": {name: len(set(split.packages)) for name, split in splits.items()},
        "test_queries": len(test.asked),
        "test": {"cosine": measured(cosine, cosine), "maxsim": measured(nearest_tokens, cosine)},
    }


def _test(reader: Reader, model: Any, split: Split, test: Candidates) -> dict[str, float]:
    ranks = reciprocal_ranks(test, rerank(reader, model, split, test))
    return measured(ranks, reciprocal_ranks(test, test.cosines))


def _write(out: Path, variant: str, model: Any, run: TrainingRun) -> None:
    if variant == "full":
        write_full(out, model)
    else:
        write_low_rank(out, run)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="a folder with all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.3)
    parser.add_argument("--variants", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--limit", type=int, help="pairs per split, for a quick trial")
    parser.add_argument(
        "--queries", type=int, default=64, help=("queries per step, with 8 pairs each")
    )
    parser.add_argument("--chunk", type=int, default=256, help="texts computed together")
    return parser.parse_args()


if __name__ == "__main__":
    main()
