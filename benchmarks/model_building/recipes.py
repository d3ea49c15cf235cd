"""The training of the built-in models: their recipes, and what makes tokenizer, weights and model card from text.

Part of the source tree only. `python -m benchmarks.model_building` runs it.
"""

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from textwrap import fill
from typing import Any

import torch
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.model_building import pretrain
from benchmarks.model_building.pretrain import Recipe, Report
from pipeline.models.catalog import ZOO, BuiltinModel
from pipeline.models.catalog import find as find_model
from pipeline.sources import corpus
from stages.engine.models import huggingface
from store.errors import ModelError

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"

# GPT-2's split: words, numbers of any length, punctuation runs, spaces one before the next word.
SPLIT_WHOLE_NUMBERS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama-3's split: numbers in groups of three, punctuation takes following newlines.
SPLIT_THREE_DIGITS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# GPT-2's split, but every digit by itself.
SPLIT_SINGLE_DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class ModelRecipe:
    """How a built-in model is made."""

    model: BuiltinModel  # what is made
    split: str  # the byte-level BPE's splitting pattern; empty for the SentencePiece-style tokenizer
    texts: dict[str, float]  # which texts it learns from, and the share of each that is taken (1 = all)
    training: Recipe  # steps, rates, seed


GENERAL_TEXTS = {"wikitext2": 1.0, "dolly_partial": 1.0, "tinystories": 1.0, "documentation": 0.25}
ALL_TEXTS = {**GENERAL_TEXTS, "documentation": 1.0, "functions": 1.0, "gsm8k": 1.0, "mbpp": 1.0}

RECIPES = {
    recipe.model.name: recipe
    for recipe in (
        ModelRecipe(
            ZOO["drafter-1.6m"],
            "",
            {**GENERAL_TEXTS, "functions": 0.02},
            Recipe(steps=1000, rows=4, length=512, peak_rate=5e-3),
        ),
        ModelRecipe(  # the texts without a chat template; `distilled` adds the others
            ZOO["drafter-4m"],
            SPLIT_SINGLE_DIGITS,
            {**GENERAL_TEXTS, "functions": 0.3},
            Recipe(steps=8897, rows=8, length=256, peak_rate=4e-3),
        ),
        ModelRecipe(
            ZOO["target-7m"],
            SPLIT_WHOLE_NUMBERS,
            ALL_TEXTS,
            Recipe(steps=1100, rows=4, length=512, peak_rate=5e-3),
        ),
        ModelRecipe(
            ZOO["target-12m"],
            SPLIT_THREE_DIGITS,
            ALL_TEXTS,
            Recipe(steps=900, rows=4, length=512, peak_rate=4e-3),
        ),
    )
}


def document(prompt: str, reference: str) -> str:
    """One training document of a dataset row: the prompt, a line break, the answer."""
    return f"{prompt.rstrip()}\n{reference}"


def _dataset_documents(folder: Path, name: str) -> Iterator[str]:
    """Documents of one prepared dataset; only the training split where there is one."""
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise ModelError(f"the recipe needs {path}; name the folder of the prepared datasets with --data")
    for row in parquet.read_table(path, columns=["split", "prompt", "reference"]).to_pylist():
        if name in ("gsm8k", "mbpp") and row["split"] != "train":
            continue
        text = document(row["prompt"], row["reference"]) if name != "wikitext2" else row["prompt"] + row["reference"]
        text = re.sub(r"<<[^>]*>>", "", text)  # GSM8K's calculator marks
        yield re.sub(r" ?<unk>", "", re.sub(r" @(.)@ ", r"\1", text))  # WikiText's marks


def documents(recipe: ModelRecipe, data: Path) -> list[str]:
    """The training documents of a model, shuffled by its seed."""
    found: list[str] = []
    for name, share in recipe.texts.items():
        if name in ("documentation", "functions"):
            passages = getattr(corpus, name)(held_out=False)
            texts = [passage.text for passage in passages]
        else:
            texts = list(_dataset_documents(data, name))
        Random(f"{name}{recipe.training.seed}").shuffle(texts)
        found += texts[: max(1, round(share * len(texts)))]
    Random(recipe.training.seed).shuffle(found)
    return found


def train_tokenizer(recipe: ModelRecipe, texts: list[str], path: Path) -> None:
    """Learn a BPE of the recipe's kind on `texts` and write it to `path`."""
    special = [UNK, BOS, EOS, PAD]
    if recipe.split:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(recipe.split), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(unk_token=UNK, byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        # Pieces begin at space marks; every line break and every digit is a piece of its own, as in Llama-2.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"▁*[^▁\n]*"), "isolated"), pre_tokenizers.Digits(individual_digits=True)]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.model.vocabulary_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=max(len(alphabet), 160),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # texts begin with BOS, as they did in training
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    path.write_text(_without_special_bytes(tokenizer.to_str()), encoding="utf-8")


def _without_special_bytes(serialized: str) -> str:
    """Take the 256 byte tokens out of the special tokens: they are ordinary pieces of text."""
    state = json.loads(serialized)
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(state, ensure_ascii=False)


def select_recipes(names: Sequence[str], steps: int | None) -> list[ModelRecipe]:
    """The recipes of the named models, with another number of steps if one is given.

    Raises:
        ModelError: for an unknown name.
    """
    found = [RECIPES[find_model(name.removeprefix("builtin:")).name] for name in names]
    return [
        replace(recipe, training=replace(recipe.training, steps=steps or recipe.training.steps)) for recipe in found
    ]


def make_tokenizer(recipe: ModelRecipe, texts: list[str]) -> Any:
    """Learn a tokenizer of the recipe's kind on `texts`."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "tokenizer.json"
        train_tokenizer(recipe, texts, path)
        special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK}
        return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face folder: bfloat16 safetensors, configuration, tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_llama(recipe: ModelRecipe, tokenizer: Any) -> Any:
    """Make the recipe's model with random weights drawn with its seed."""
    return huggingface.new_llama(
        recipe.training.seed,
        vocab_size=recipe.model.vocabulary_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **recipe.model.shape,
    )


def build(recipe: ModelRecipe, data: Path, out: Path, progress: Callable[[int, float], None]) -> Report:
    """Make one built-in model from text and write its folder with a model card.

    Args:
        data: folder of the prepared datasets (Parquet files with `prompt` and `reference`).
        out: parent of the new model's folder.
        progress: called with the number of steps done and the last one's loss.
    """
    model, texts = recipe.model, documents(recipe, data)
    tokenizer = make_tokenizer(recipe, texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    held_out = max(1, len(encoded) // 50)
    tokens = [torch.tensor([bos, *ids, eos]) for ids in encoded]
    llama = make_llama(recipe, tokenizer)
    report = pretrain.pretrain(
        llama, torch.cat(tokens[held_out:]), torch.cat(tokens[:held_out]), recipe.training, progress
    )
    folder = out / model.name
    samples = [pretrain.sample_text(llama, tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
    save(folder, llama, tokenizer)
    (folder / "README.md").write_text(model_card(recipe, report, samples), encoding="utf-8")
    return report


CARD_WIDTH = 100  # columns
LICENCES = {
    "documentation": "Python's standard library without the held-out tenth of its modules, PSF",
    "functions": "Python's standard library without the held-out tenth of its modules, PSF",
    "gsm8k": "GSM8K train, MIT",
    "mbpp": "MBPP train, CC BY 4.0",
    "wikitext2": "WikiText-2, CC BY-SA",
    "dolly_partial": "Dolly, CC BY-SA 3.0",
    "tinystories": "TinyStories, CDLA-Sharing-1.0",
    "self_instruct": "Self-Instruct, Apache 2.0",
    "mawps": "MAWPS train, MIT",
    "glaive_toolcall_demo": "questions of Glaive tool calls, Apache 2.0",
    "scitldr": "SciTLDR train, Apache 2.0",
}
OWN_LICENCE = "- Licence of the weights: Apache License 2.0, as that of the project."
SAMPLE_PROMPTS = (
    "Natalia sold 12 clips in April and 5 more in May. How many clips did she sell?",
    "Write a function to find the largest of three numbers.",
    "Return a list of the names of all",
    "The history of the city begins with",
)


def model_card(recipe: ModelRecipe, report: Report, samples: list[str]) -> str:
    """The README of a built-in model: what it is, how it was made, how good it is."""
    model = recipe.model
    parameters = ", ".join(f"{share:.0%} of {name}" for name, share in recipe.texts.items())
    lines = [
        f"# {model.name}",
        "",
        f"A small Llama ({model.role} of omnidraft's built-in pairs), vocabulary {model.vocabulary_size:,}, "
        f"shape `{json.dumps(model.shape)}`, bfloat16.",
        "",
        f"- Made by `python -m benchmarks.model_building {model.name}` with `{json.dumps(asdict(recipe.training))}`.",
        f"- Text: {parameters}.",
        f"- Licences of the text: {'; '.join(sorted({LICENCES[name] for name in recipe.texts}))}.",
        OWN_LICENCE,
        f"- Tokens seen: {report.tokens_seen:,}, in {report.seconds:,.0f} s.",
        f"- Loss: {report.train_loss:.3f} nats per token at the end of training, "
        f"**{report.validation_loss:.3f}** on held-out documents "
        f"(perplexity {math.exp(report.validation_loss):.1f}).",
        "",
        "It writes text of the right form and little sense; it is here so that the pipeline runs without a download.",
        "Greedy samples:",
        "",
    ]
    for prompt, text in zip(SAMPLE_PROMPTS, samples, strict=True):
        lines += ["```text", f"{prompt}⏎", text, "```", ""]
    return wrap_card("\n".join(lines))


def wrap_card(text: str) -> str:
    """Wrap the long lines of a README; the other lines of a point are indented."""
    return "\n".join(
        fill(line, CARD_WIDTH, subsequent_indent="  " * line.startswith("- "), break_on_hyphens=False)
        if len(line) > CARD_WIDTH
        else line
        for line in text.split("\n")
    )
