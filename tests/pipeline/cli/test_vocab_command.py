"""`omnidraft vocab`: the tokens that two vocabularies share, for tokenizers whose every token is known."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import Result
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from typer import Typer
from typer.testing import CliRunner

from benchmarks.model_building import recipes
from pipeline.cli.models import SPECIALS_SHOWN, _print_report, vocab
from pipeline.config.settings import Config
from pipeline.reports.vocab_report import (
    CommonNgram,
    describe_pairs,
    load_pair,
    make_report,
    read_prompts,
    to_readable,
    write_pair_reports,
)
from stages.engine.models.huggingface import wrap_tokenizer
from store.errors import ConfigError, ModelError, SourceError

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
    wrap_tokenizer(folder / "raw.json", bos_token=recipes.BOS, eos_token=recipes.EOS).save_pretrained(folder)
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


def config_of(folders: tuple[str, str], source: str, **others: object) -> Config:
    given = {"targets": (folders[0],), "drafter": folders[1], "sources": (source,)}
    return Config().with_overrides({**given, **others})


@pytest.fixture(scope="module")
def found(folders: tuple[str, str], source: str) -> dict:
    """The report, by way of JSON."""
    return json.loads(run(*folders, "--text", source, "--json").stdout)


def test_every_token_of_the_vocabulary_is_counted_once(found: dict):
    counted = found["direct"] + sum(found["ngrams"].values()) + found["unspelt"] + found["silent"]
    assert counted == found["target_size"]
    assert sum(found["ngrams"].values()) > 5
    assert found["silent"] == 31, "the start and the reserved tokens are blocked"


def test_a_run_writes_the_report_without_a_text(folders: tuple[str, str], source: str, found: dict, tmp_path: Path):
    target, drafter, words = load_pair(config_of(folders, source))
    loaded = SimpleNamespace(target_vocabulary=target, drafter_vocabulary=drafter, pair=words)
    write_pair_reports(tmp_path / "vocabulary.json", describe_pairs([cast("Any", loaded)]))
    (written,) = json.loads((tmp_path / "vocabulary.json").read_text())
    assert written == {name: value for name, value in found.items() if name != "text"}


def test_every_token_of_the_text_is_counted_once(found: dict):
    whole = found["text"]["whole"]
    assert whole["direct"] + sum(whole["ngrams"].values()) + whole["unspelt"] == whole["tokens"]
    assert found["text"]["prompts"] == 4 * len(TEXTS)
    assert found["text"]["characters"] == 4 * sum(map(len, TEXTS))
    assert found["text"]["drafter_tokens"] > whole["tokens"]


def test_a_text_that_repeats_itself_is_in_the_cache_after_half_of_it(found: dict):
    cache = found["text"]["cache"]
    assert cache["direct"] + cache["cached"] + cache["missed"] == cache["tokens"]
    assert cache["missed"] == 0
    assert cache["cached"] > 0
    assert 0 < cache["bytes"] <= found["text"]["budget_bytes"] == Config().cache.budget_bytes


def test_the_commonest_ngrams_are_shown_with_their_pieces(found: dict):
    first = found["text"]["commonest"][0]
    assert (first["text"], first["count"]) == ("▁cat", 4 * len(TEXTS))
    assert "".join(first["pieces"]) == "▁cat"
    assert len(first["pieces"]) > 1


def test_special_tokens_are_mapped_by_role_name_or_not_at_all(found: dict):
    specials = {special["name"]: special for special in found["specials"]}
    assert (specials["<s>"]["how"], specials["<s>"]["text"]) == ("role", ["<s>"])
    assert (specials["<|end|>"]["how"], specials["<|end|>"]["text"]) == ("name", ["<|end|>"])
    assert (specials["<|start|>"]["how"], specials["<|start|>"]["pieces"]) == ("blocked", [])
    assert len(specials) == 2 + len(NAMES)


def test_options_change_the_map(folders: tuple[str, str], source: str):
    changed = json.loads(run(*folders, "--text", source, "--json", "--special", "spell").stdout)
    specials = {special["name"]: special for special in changed["specials"]}
    assert specials["<|reserved_4|>"]["how"] == "spelt"
    assert "".join(specials["<|reserved_4|>"]["text"]) == "<|reserved_4|>"


def test_a_template_adds_other_columns(folders: tuple[str, str], source: str, found: dict):
    longer = json.loads(run(*folders, "--text", source, "--json", "--template", "{prompt} {answer}").stdout)
    assert longer["text"]["characters"] == found["text"]["characters"] + 4 * len(TEXTS) * len(" end")


def test_the_report_is_printed_as_tables(folders: tuple[str, str], source: str, found: dict):
    shown = run(*folders, "--text", source).stdout
    assert f"{found['target_size']:,} tokens" in shown
    for title in ("Target tokens by pieces", "Special tokens of the target", "Commonest n-grams of the text"):
        assert title in shown
    assert f"{2 + len(NAMES) - SPECIALS_SHOWN} more" in shown
    assert "second half: " in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_markup_in_a_token_is_shown_unchanged(folders: tuple[str, str]):
    config = config_of(folders, "builtin:docs")
    made = make_report(config, *load_pair(config), ["the cat"])
    odd = CommonNgram(1, "[bold]x[/bold]", ("[bo", "ld]x[/bold]"), 1)
    console = Console(width=80, record=True, file=StringIO())
    _print_report(console, replace(made, text=replace(made.text, commonest=(odd,))))
    assert "[bold]x[/bold]   [bo ld]x[/bold]" in console.export_text()


def test_without_a_text_the_built_in_streams_are_used(folders: tuple[str, str]):
    config = Config().with_overrides({"targets": (folders[0],), "drafter": folders[1]})
    assert len(read_prompts(config)) == 300


def test_no_weights_are_needed(folders: tuple[str, str]):
    assert not list(Path(folders[0]).glob("*.safetensors"))


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


def test_a_source_without_prompts_is_refused(folders: tuple[str, str], tmp_path: Path):
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps({"prompt": ""}), encoding="utf-8")
    with pytest.raises(SourceError, match=r"must hold at least one prompt, but .*empty\.jsonl holds none"):
        run(*folders, "--text", str(path))


def test_a_folder_without_a_tokenizer_is_refused(folders: tuple[str, str], tmp_path: Path, source: str):
    with pytest.raises(ModelError, match="tokenizer must load"):
        run(str(tmp_path), folders[1], "--text", source)


@pytest.mark.parametrize(
    ("spelt", "shown"),
    [
        (b" the", "▁the"),
        (b".\n\n", ".\\n\\n"),
        (b"\xe2\x82", "\\xe2\\x82"),
        ("é".encode(), "é"),
        (b"\x1b[2J", "\\x1b[2J"),
    ],
)
def test_a_token_is_shown_as_one_visible_word(spelt: bytes, shown: str):
    assert to_readable(spelt) == shown
