"""`omnidraft vocab`: the tokens that two vocabularies share, for tokenizers whose every token is known."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer import Typer
from typer.testing import CliRunner

from benchmarks.model_building import recipes
from pipeline.cli.models import vocab
from store.errors import ConfigError, SourceError

TEXTS = ["the cat sat", "the dog sat on the cat", "a cat\nand a dog", "the the the cat [bold]"]
NAMES = ("<|start|>", "<|end|>", *(f"<|reserved_{n}|>" for n in range(30)))


def save_tokenizer(folder: Path, texts: Sequence[str], split: str, specials: Sequence[str]) -> Path:
    """Train a byte-level BPE on a few words and save it as a folder without a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[recipes.BOS, recipes.EOS, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "raw.json"))
    special = {"bos_token": recipes.BOS, "eos_token": recipes.EOS}
    PreTrainedTokenizerFast(tokenizer_file=str(folder / "raw.json"), **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The target knows words, the drafter letters and pairs of them."""
    root = tmp_path_factory.mktemp("tokenizers")
    target = save_tokenizer(root / "target", TEXTS, r" ?\w+|[^\w]", NAMES)
    drafter = save_tokenizer(root / "drafter", TEXTS, r"\w{1,2}|[^\w]", ["<|end|>"])
    return str(target), str(drafter)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "cats.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "answer": "end"}) for text in TEXTS * 4), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    app = Typer()
    app.command()(vocab)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def found(folders: tuple[str, str], source: str) -> dict:
    """The report, by way of JSON."""
    return json.loads(run(*folders, "--text", source, "--json").stdout)


def test_every_token_of_the_text_is_counted_once(found: dict):
    whole = found["text"]["whole"]
    assert whole["direct"] + sum(whole["ngrams"].values()) + whole["unspelt"] == whole["tokens"]
    assert found["text"]["prompts"] == 4 * len(TEXTS)
    assert found["text"]["characters"] == 4 * sum(map(len, TEXTS))
    assert found["text"]["drafter_tokens"] > whole["tokens"]


def test_special_tokens_are_mapped_by_role_name_or_not_at_all(found: dict):
    specials = {special["name"]: special for special in found["specials"]}
    assert (specials["<s>"]["how"], specials["<s>"]["text"]) == ("role", ["<s>"])
    assert (specials["<|end|>"]["how"], specials["<|end|>"]["text"]) == ("name", ["<|end|>"])
    assert (specials["<|start|>"]["how"], specials["<|start|>"]["pieces"]) == ("blocked", [])
    assert len(specials) == 2 + len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--special", "drop"), ConfigError, "'vocabulary.special' must be 'spell' or 'block'"),
        (("--text", "nowhere.jsonl"), SourceError, "must be a file"),
    ],
)
def test_impossible_options_are_refused(folders: tuple[str, str], source: str, arguments, error, message: str):
    text = () if "--text" in arguments else ("--text", source)
    with pytest.raises(error, match=message.replace("|", r"\|")):
        run(*folders, *text, *arguments)
