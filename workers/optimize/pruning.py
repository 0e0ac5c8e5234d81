"""Structured pruning: removes the least important inner neurons and attention heads.

Pruning cuts a linear layer's inputs (the consumer) together with the corresponding outputs of the
layers that produce them (the producers). torch.nn.utils.prune only sets weights to zero, so a
pruned matrix costs just as much as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shared.errors import ConfigurationError
from workers.models.base import PreparedText
from workers.optimize.calibration import INPUTS, feed_of

_RIDGE = 1e-3
"""Ridge penalty relative to the mean variance, for neurons that never activate."""


@dataclass(frozen=True)
class Pruned:
    """The number of inner neurons and heads that were cut, along with the totals."""

    neurons: int
    of_neurons: int
    heads: int
    of_heads: int


@dataclass(frozen=True)
class _Cut:
    """A linear layer, its inputs in groups of `width` (a head, or 1), and the preceding layers."""

    consumer: torch.nn.Linear
    producers: Sequence[torch.nn.Linear]
    width: int


def prune(model: Any, texts: Sequence[PreparedText], *, neurons: float, heads: float) -> Pruned:
    """Cuts a fraction of each layer in `model`, in place, and refits the layers that follow.

    Args:
        model: a transformer with BERT's architecture, in fp32.
        texts: texts used to measure importance and to refit.
        neurons: fraction of each layer's inner neurons to cut, from 0 to 1.
        heads: fraction of each layer's attention heads to cut, from 0 to 1. At least one head
            always remains.

    Raises:
        ConfigurationError: the model has no such layers.
    """
    mlps, attentions = _mlp_cuts(model), _head_cuts(model)
    whole = Pruned(0, _groups(mlps), 0, _groups(attentions))
    cut_neurons = _cut_all(model, mlps, texts, neurons) if neurons else 0
    cut_heads = _cut_all(model, attentions, texts, heads) if heads else 0
    return replace(whole, neurons=cut_neurons, heads=cut_heads)


def _layers(model: Any) -> Any:
    layers = getattr(getattr(model, "encoder", None), "layer", None)
    if (
        not layers
        or not hasattr(layers[0], "intermediate")
        or not hasattr(layers[0].attention, "self")
    ):
        raise ConfigurationError(
            f"pruning does not support layers of the {model.config.model_type} family",
            field="prune",
        )
    return layers


def _mlp_cuts(model: Any) -> list[_Cut]:
    return [_Cut(layer.output.dense, [layer.intermediate.dense], 1) for layer in _layers(model)]


def _head_cuts(model: Any) -> list[_Cut]:
    width = model.config.hidden_size // model.config.num_attention_heads
    return [
        _Cut(
            layer.attention.output.dense,
            [getattr(layer.attention.self, name) for name in ("query", "key", "value")],
            width,
        )
        for layer in _layers(model)
    ]


def _groups(cuts: Sequence[_Cut]) -> int:
    return sum(cut.consumer.in_features // cut.width for cut in cuts)


def _cut_all(model: Any, cuts: Sequence[_Cut], texts: Sequence[PreparedText], part: float) -> int:
    """Cuts the fraction `part` of the groups in each layer. Returns how many groups were cut."""
    before = _groups(cuts)
    # All layers are measured before any are cut. Otherwise, layers would be fitted to one another's
    # errors.
    for cut, inputs in zip(cuts, _inputs_of(model, cuts, texts), strict=True):
        _cut(cut, inputs, part)
    return before - _groups(cuts)


def _inputs_of(
    model: Any, cuts: Sequence[_Cut], texts: Sequence[PreparedText]
) -> list[torch.Tensor]:
    """Returns each consumer's inputs over all texts, [tokens, features]."""
    seen: list[list[torch.Tensor]] = [[] for _ in cuts]

    def record(
        inputs: list[torch.Tensor],
    ) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, arguments: inputs.append(arguments[0].flatten(0, -2))

    hooks = [
        cut.consumer.register_forward_pre_hook(record(inputs))
        for cut, inputs in zip(cuts, seen, strict=True)
    ]
    try:
        with torch.inference_mode():
            for text in texts:
                model(
                    **{
                        name: torch.from_numpy(array)
                        for name, array in feed_of(text, INPUTS).items()
                    }
                )
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(inputs).clone() for inputs in seen]


def _cut(cut: _Cut, inputs: torch.Tensor, part: float) -> None:
    """Drops the least contributing groups of `inputs` [tokens, features] and refits the consumer.

    A feature's contribution is its deviation from its mean, multiplied by the norm of its weight
    column. The mean of the dropped features is added to the bias, and a ridge regression on the
    kept features partly compensates for the rest.
    """
    weight, mean = cut.consumer.weight, inputs.mean(0)
    around = inputs - mean
    contribution = (around.pow(2).mean(0) * weight.pow(2).sum(0)).reshape(-1, cut.width).sum(1)
    dropped = contribution.argsort()[: min(round(part * len(contribution)), len(contribution) - 1)]
    keeps = torch.ones(len(contribution), dtype=torch.bool)
    keeps[dropped] = False
    is_kept = keeps.repeat_interleave(cut.width)
    known = around[:, is_kept]
    gram = known.T @ known
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    correction = torch.linalg.solve(gram, known.T @ (around[:, ~is_kept] @ weight[:, ~is_kept].T)).T
    offset = weight[:, ~is_kept] @ mean[~is_kept] - correction @ mean[is_kept]
    _resize(cut.consumer, weight[:, is_kept] + correction, cut.consumer.bias + offset)
    for producer in cut.producers:
        _resize(producer, producer.weight[is_kept], producer.bias[is_kept])


def _resize(linear: torch.nn.Linear, weight: torch.Tensor, bias: torch.Tensor) -> None:
    linear.out_features, linear.in_features = weight.shape
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    linear.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
