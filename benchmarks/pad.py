"""Pads a small Llama to a larger one with the same outputs, to measure speed at the cost of a larger model:
`python -m benchmarks.pad builtin:target-7m padded-100m --millions 100`.

The residual stream is widened by dimensions that no layer writes to; new heads, new MLP units and new layers compute on
random weights of the usual scale, and their outputs vanish in the rounding of the residual stream. The arithmetic is
that of a dense model of the new shape; the text is the small model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.command import run
from pipeline.models.pullable import resolve_name
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, new_llama
from store.errors import ModelError, UsageError

MULTIPLE = 64  # widths of MLPs are multiples of it, for fast kernels
TYPES = ("float32", "bfloat16")  # float16 would round the silenced weights to zero
# Not zero: engines store equal matrices once, and a quantisation scale of zero divides by zero. Not denormal either.
SILENT = 1e-10
SHAPE = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# Usual width of the residual stream and number of layers of models with fewer parameters.
USUAL = ((200_000_000, 768, 12), (600_000_000, 1024, 24), (float("inf"), 1536, 28))
RESHAPED = (*SHAPE, "head_dim", "rms_norm_eps", "dtype", "architectures", "transformers_version")


@dataclass(frozen=True)
class Widths:
    """The shape to pad to: width of the residual stream, layers, units of an MLP."""

    hidden: int
    layers: int
    mlp: int


def widths_for(parameters: int, config: Any) -> Widths:
    """Choose a usual shape of about that many parameters: layers and width by size, the MLP takes the rest. It has no
    fewer layers than the small model.

    Args:
        parameters: of the padded model.
        config: the small model's `LlamaConfig`.

    Raises:
        ModelError: if the small model is of another kind or does not fit in.
    """
    _require_llama(config)
    usual, usual_layers = next((width, layers) for below, width, layers in USUAL if parameters < below)
    layers = max(usual_layers, config.num_hidden_layers)
    step = _width_unit(config)
    hidden = round(usual / step) * step
    keys = hidden // step * config.head_dim  # width of all keys
    attention = 2 * hidden * (hidden + keys)
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    units = ((parameters - embeddings) / layers - attention) / (3 * hidden)
    widths = Widths(hidden, layers, max(0, round(units / MULTIPLE)) * MULTIPLE)
    _require_larger(config, widths)
    return widths


def pad_model(model: Any, widths: Widths, seed: int) -> Any:
    """Make a `LlamaForCausalLM` of another shape with the outputs of `model`, up to the rounding of sums.

    Args:
        model: a `LlamaForCausalLM` without biases; it is not changed.
        widths: at least those of `model`. The width of a head and the query heads per key-value head stay, and
            `hidden` is a multiple of their product.
        seed: of the random weights.

    Raises:
        ModelError: if `model` is of another kind or does not fit in.
    """
    config = model.config
    _require_llama(config)
    _require_larger(config, widths)
    kept = {name: value for name, value in config.to_dict().items() if name not in RESHAPED}
    large = new_llama(
        seed,
        **kept,
        hidden_size=widths.hidden,
        num_hidden_layers=widths.layers,
        intermediate_size=widths.mlp,
        num_attention_heads=widths.hidden // config.head_dim,
        num_key_value_heads=widths.hidden // _width_unit(config),
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / widths.hidden,
    )
    large.generation_config = model.generation_config
    with torch.no_grad():
        _copy_weights(large, model)
    return large.eval()


def _width_unit(config: Any) -> int:
    """Return the unit of widths: all query heads of one key-value head."""
    return int(config.head_dim * config.num_attention_heads // config.num_key_value_heads)


def _require_llama(config: Any) -> None:
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ModelError(f"a padded model must be a Llama without biases, this is {config.model_type}; try another")


def _require_larger(config: Any, widths: Widths) -> None:
    old = Widths(config.hidden_size, config.num_hidden_layers, config.intermediate_size)
    if old.hidden > widths.hidden or old.layers > widths.layers or old.mlp > widths.mlp:
        raise ModelError(f"a padded model must be larger, {old} does not fit in {widths}; set more parameters")
    if widths.hidden % _width_unit(config):
        raise ModelError(f"the padded width must be a multiple of {_width_unit(config)}, got {widths.hidden}")
    heads = widths.hidden // config.head_dim
    if heads < config.num_attention_heads:
        raise ModelError(
            f"a padded model must have room for {config.num_attention_heads} heads of {config.head_dim}, a width of "
            f"{widths.hidden} has {heads}; set more parameters"
        )


def _copy_weights(large: Any, small: Any) -> None:
    """Copy the small model's weights; silence all other weights that write to the residual stream."""
    _copy_embedding(large.model.embed_tokens, small.model.embed_tokens)
    if not small.config.tie_word_embeddings:
        large.lm_head.weight[:, : small.config.hidden_size] = small.lm_head.weight
    _copy_norm(large.model.norm, small.model.norm)
    places = _spread_layers(len(small.model.layers), len(large.model.layers))
    for place, layer in enumerate(large.model.layers):
        layer.self_attn.o_proj.weight.mul_(SILENT)
        layer.mlp.down_proj.weight.mul_(SILENT)
        if place in places:
            _copy_layer(layer, small.model.layers[places.index(place)])


def _spread_layers(some: int, among: int) -> Sequence[int]:
    """Return the indices of `some` layers, spread evenly among `among`."""
    return [number * among // some for number in range(some)]


def _copy_embedding(large: nn.Embedding, small: nn.Embedding) -> None:
    large.weight.zero_()
    large.weight[:, : small.weight.shape[1]] = small.weight


def _copy_norm(large: Any, small: Any) -> None:
    """Copy a norm. The mean square is over more dimensions: the weight and the configured epsilon compensate for it."""
    old, new = small.weight.shape[0], large.weight.shape[0]
    large.weight[:old] = small.weight * (old / new) ** 0.5


def _copy_layer(large: Any, small: Any) -> None:
    _copy_norm(large.input_layernorm, small.input_layernorm)
    _copy_norm(large.post_attention_layernorm, small.post_attention_layernorm)
    for block in ("self_attn", "mlp"):
        old = dict(getattr(small, block).named_parameters())
        for name, weight in getattr(large, block).named_parameters():
            _copy_corner(weight, old[name])


def _copy_corner(large: Tensor, small: Tensor) -> None:
    large[: small.shape[0], : small.shape[1]] = small


@dataclass(frozen=True)
class Padding:
    """A padded model that was written."""

    widths: Widths  # its shape
    parameters: int  # their number; tied ones count once
    difference: float  # largest difference of its logits to the small model's on a text, relative to the largest logit


TEXT = (
    "Natalia sold 12 clips in April and 5 more in May. How many clips did she sell?\ndef total(clips):\n    return sum("
)


def write_padded(source: str, folder: Path, parameters: int, dtype: str, seed: int) -> Padding:
    """Pad a model and write it as a Hugging Face folder with its tokenizer and generation configuration.

    Args:
        source: hub name or folder of the small model.
        folder: the folder to write.
        parameters: approximate number of parameters.
        dtype: of the written weights: float32 or bfloat16. In float16 the silenced weights would be zero.
        seed: of the random weights.

    Raises:
        ModelError: the model does not load, is no Llama, or is too large; or the type is not allowed.
    """
    if dtype not in TYPES:
        raise ModelError(
            f"padded weights must be float32 or bfloat16, got {dtype!r}; those that change nothing are below float16's "
            "range and would become zero"
        )
    small, tokenizer = load_causal_model(source, "float32", "cpu"), load_tokenizer(source)
    widths = widths_for(parameters, small.config)
    large = pad_model(small, widths, seed).to(getattr(torch, dtype))
    large.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    number = sum(weight.numel() for weight in large.parameters())
    return Padding(widths, number, largest_difference(small, large, tokenizer(TEXT)["input_ids"]))


def largest_difference(one: Any, other: Any, ids: Sequence[int]) -> float:
    """Return the largest difference of two models' logits on a text, relative to the largest logit of the first.

    Args:
        one, other: of one vocabulary, in any types.
        ids: the text's ids.
    """
    ids_1N = torch.tensor([list(ids)])
    with torch.inference_mode():
        logits, others = (model(ids_1N).logits.float() for model in (one, other))
    return float((logits - others).abs().max() / logits.abs().max())


def pad(
    source: Annotated[str, typer.Argument(help="A model of the zoo, or the folder of a Llama.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the padded model: a new or empty folder.")],
    millions: Annotated[float, typer.Option(min=1, help="About how many million parameters.")] = 100,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
) -> None:
    """Pad a small Llama with weights that change nothing: its outputs at a larger model's cost, to measure speed."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"a padded model must go to a new or empty folder, '{folder}' is neither; name another")
    found = write_padded(resolve_name(source), folder, round(millions * 1e6), dtype, seed=0)
    shape = f"{found.widths.layers} layers x {found.widths.hidden}, MLP {found.widths.mlp}"
    typer.echo(f"{folder}: {found.parameters:,} parameters ({shape}), {dtype}")
    typer.echo(f"largest difference of logits to {source}: {found.difference:.2e} of the largest logit")


if __name__ == "__main__":
    run(pad)
