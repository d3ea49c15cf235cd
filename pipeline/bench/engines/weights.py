"""Loads a Llama for other engines: its shape, and its weights as arrays by Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assembly.models import Models, locate, registry_uri
from pipeline.config.settings import Config
from stages.engine.models.devices import count_threads
from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from stages.tools.transformers_baselines import LOOKUP_TOKENS
from store.errors import ModelError

Array = np.ndarray[Any, Any]
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # as both engines name them


class Mode(StrEnum):
    """How an engine decodes. The value is the suffix of an arm's name after that of its engine."""

    PLAIN = ""
    SPECULATIVE = "-speculative"  # with the drafter
    LOOKUP = "-lookup"  # with drafts copied from the own text


CONTEXT_STEP = 256  # tokens; engines allocate caches in such steps
LOOKUP_NGRAM = 3  # tokens of the own text that must be equal before a draft is copied


@dataclass(frozen=True)
class Llama:
    """A Llama and its tokenizer.

    Attributes:
        weights: float32 arrays by name; without `lm_head.weight` the embedding is the output layer.
        layers, width, heads, pairs, head, mlp, vocabulary: shape of the model; `pairs` are key-value heads, `head` is
            the width of one head.
        longest: context length in tokens.
        epsilon, theta: constants of the norms and of the rotary positions.
        tokenizer: tokenizer of `transformers`.
    """

    weights: Mapping[str, Array]
    layers: int
    width: int
    heads: int
    pairs: int
    head: int
    mlp: int
    vocabulary: int
    longest: int
    epsilon: float
    theta: float
    tokenizer: Any


def load_llama(source: str) -> Llama:
    """Load a Llama from a hub name or folder.

    Raises:
        ModelError: the model does not load, or is not a plain Llama.
    """
    model = load_causal_model(source, "float32", "cpu")
    config = model.config
    positions = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or positions["rope_type"] != "default":
        raise ModelError(
            f"other engines need a Llama without biases and with plain rotary positions, {source!r} is another model "
            f"({config.model_type}); leave these engines out"
        )
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return Llama(
        weights=weights,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        pairs=config.num_key_value_heads,
        head=config.head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        longest=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        theta=positions["rope_theta"],
        tokenizer=load_tokenizer(source),
    )


@dataclass(frozen=True)
class EngineRequest:
    """Models, sampling and precision, equal for all engines and for the other arms.

    Attributes:
        target, drafter: hub names or folders of the models.
        max_draft: pieces drafted per block.
        temperature, top_k, top_p, max_new_tokens, seed: sampling; temperature 0 is greedy, `top_k` 0 keeps all.
        ends: end-of-sequence ids, the one of the model first; none if there is none.
        longest: context length that the longest prompt with its completion needs, in tokens.
        batch: batch size.
        threads: CPU threads.
        dtype: type of weights and cache of both models, a key of `PRECISIONS`; that of the target in our arms.
    """

    target: str
    drafter: str
    max_draft: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    seed: int
    ends: tuple[int, ...]
    longest: int
    batch: int
    threads: int
    dtype: str


def request_of(config: Config, models: Models, fetched: Path, longest: int) -> EngineRequest:
    """The request that a configuration describes.

    Args:
        config: models, sampling, lengths, batch size and seed.
        models: the loaded models.
        fetched: folder for models that a registry holds.
        longest: tokens of the longest prompt and completion together.

    Raises:
        ModelError: the target has a type that other engines do not support.
    """
    ends, own = models.eos_ids, models.target_vocabulary.eos
    spare = max(config.draft.max_draft, LOOKUP_TOKENS) + 2  # tokens of a block that the limit of length cuts off
    context = -(-(longest + spare) // CONTEXT_STEP) * CONTEXT_STEP
    dtype = str(models.target.model.dtype).removeprefix("torch.")
    if dtype not in PRECISIONS:
        raise ModelError(f"other engines compute in {', '.join(PRECISIONS)}, {models.name} is {dtype}; set the dtype")
    sampling = config.sampling
    return EngineRequest(
        target=locate(models.name, registry_uri(config), fetched),
        drafter=str(models.drafter_folder or config.drafter),
        max_draft=config.draft.max_draft,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        seed=config.seed,
        ends=tuple(sorted(ends, key=lambda token: (token != own, token))),
        longest=min(models.target.max_length, context),
        batch=config.batch,
        threads=count_threads(),
        dtype=dtype,
    )
