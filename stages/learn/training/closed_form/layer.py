"""The output layer of a drafter, with the weights of its targets' states, as one matrix.

Shapes: D drafter ids, X features: hidden width and, per target, the features of its state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stages.drafting.target_states import TargetStates
from stages.engine.models.language_model import LanguageModel


def untie_output(model: Any) -> None:
    """Give the model's output layer weights of its own if it shares those of the embeddings."""
    layer = output_layer(model)
    if layer.weight is model.get_input_embeddings().weight:
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
        model.config.tie_word_embeddings = False


def output_layer(model: Any) -> nn.Linear:
    """Return the module that computes a model's logits."""
    layer: nn.Linear = model.get_output_embeddings()
    return layer


def targets_of(model: LanguageModel) -> tuple[str, ...]:
    """Return the targets whose states the drafter reads."""
    return model.extra.targets if isinstance(model.extra, TargetStates) else ()


def _state_weights(model: LanguageModel) -> list[Tensor]:
    return list(model.extra.weights) if isinstance(model.extra, TargetStates) else []


def read_layer(model: LanguageModel) -> Tensor:
    """Return the weights of the output layer and of the targets' states, in float32 (D, X)."""
    weights = [output_layer(model.model).weight, *_state_weights(model)]
    return torch.cat([weight.detach().float() for weight in weights], -1)


def write_layer(model: LanguageModel, weight_DX: Tensor) -> None:
    """Set what `read_layer` returns."""
    weights = [output_layer(model.model).weight, *_state_weights(model)]
    for own, new in zip(weights, weight_DX.split([weight.shape[1] for weight in weights], -1), strict=True):
        own.copy_(new)


@contextmanager
def capture_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of a layer's calls."""
    captured: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _layer, inputs, _outputs: captured.append(inputs[0]))
    try:
        yield captured
    finally:
        hook.remove()
