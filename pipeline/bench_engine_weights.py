"""A Llama as other engines want it: its shape, and its weights as arrays by the names of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.build_models import Models, locate
from pipeline.config import Config
from stages.baselines import threads
from stages.huggingface import load_causal_model, load_tokenizer
from store.errors import ModelError

Array = np.ndarray[Any, Any]
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # in the words of both engines


@dataclass(frozen=True)
class Llama:
    """A Llama and its tokenizer.

    Attributes:
        weights: float32, by name; `lm_head.weight` only where it is not the embedding.
        layers, width, heads, pairs, head, mlp, vocabulary: its shape; `pairs` are key-value heads.
        longest: most tokens of a text.
        epsilon, theta: of the norms and of the rotary positions.
        tokenizer: of `transformers`.
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
    """Read a Llama from a hub name or folder.

    Raises:
        ModelError: it does not load, or is of another kind.
    """
    model = load_causal_model(source, "float32", "cpu")
    config = model.config
    positions = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or positions["rope_type"] != "default":
        raise ModelError(
            f"other engines get Llamas without biases and with plain rotary positions, {source!r} is another model "
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
class Request:
    """What every engine is asked, as all arms are.

    Attributes:
        target: source of the target.
        drafter: source of the drafter.
        max_draft: pieces drafted per block.
        temperature, top_k, top_p, max_new_tokens, seed: of sampling; temperature 0 is greedy, `top_k` 0 keeps all.
        end: the id that ends a text, if there is one.
        batch: most prompts at a time.
        threads: of the processor.
        dtype: of weights and cache, the drafter's too: that in which the target runs in our arms, see `PRECISIONS`.
    """

    target: str
    drafter: str
    max_draft: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    seed: int
    end: int | None
    batch: int
    threads: int
    dtype: str


def request_of(config: Config, models: Models, uri: str, fetched: Any) -> Request:
    """The request that a configuration describes.

    Raises:
        ModelError: the target has several ids that end a text, or runs in a type that other engines do not have.
    """
    ends = models.target.ends or frozenset(() if models.target_words.eos is None else (models.target_words.eos,))
    if len(ends) > 1:
        raise ModelError(f"other engines end texts at one id, {models.name} has {sorted(ends)}; leave them out")
    dtype = str(models.target.model.dtype).removeprefix("torch.")
    if dtype not in PRECISIONS:
        raise ModelError(f"other engines compute in {', '.join(PRECISIONS)}, {models.name} is {dtype}; set the dtype")
    sampling = config.sampling
    return Request(
        target=locate(models.name, uri, fetched),
        drafter=str(models.drafter_folder or config.drafter),
        max_draft=config.draft.max_draft,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        seed=config.seed,
        end=next(iter(ends), None),
        batch=config.batch,
        threads=threads(),
        dtype=dtype,
    )
