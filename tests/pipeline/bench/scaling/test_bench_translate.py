"""The translation benchmark: both ways at every context length, and a table of them. Nothing here is timed."""

import json
import re
from pathlib import Path

import pytest
from tiny_pair import sentences, tiny_model
from typer import Typer
from typer.testing import CliRunner

from pipeline.bench.scaling.translate import (
    CONTEXTS,
    PAPER,
    TARGET_STEP,
    TRIE,
    Cost,
    long_text,
    measure,
    translations,
)
from pipeline.cli.bench.parts import bench_translate
from pipeline.model_building import recipes
from stages.models.huggingface import load_tokenizer, wrap_tokenizer
from stages.tools.retokenize import text_blocks
from stages.vocabulary.pair import Pair, pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import SourceError

TEXT = "\n\n".join(sentences(0, 60))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two small tokenizers, without models."""
    found = {}
    for name in ("target", "drafter"):
        folder = tmp_path_factory.mktemp(name)
        recipes.train_tokenizer(tiny_model(name), sentences(0, 250), folder / "raw.json")
        wrap_tokenizer(folder / "raw.json", bos_token=recipes.BOS, eos_token=recipes.EOS).save_pretrained(folder)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def words(tokenizers: dict[str, Path]) -> tuple[Vocabulary, Vocabulary, Pair]:
    target, drafter = (Vocabulary(load_tokenizer(str(tokenizers[name])), name) for name in ("target", "drafter"))
    return target, drafter, pair(target, drafter)


class Clock:
    """A clock that advances by a millisecond at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def test_both_ways_are_timed_on_the_same_blocks(words):
    report = measure(*words, TEXT, 15, (8, 64), Clock())
    assert [(cost.way, cost.context) for cost in report.costs] == [(TRIE, 8), (PAPER, 8), (TRIE, 64), (PAPER, 64)]
    assert {cost.blocks for cost in report.costs} == {15}
    assert [cost.median for cost in report.costs] == pytest.approx([1e-3] * 4)
    assert report.levels == pytest.approx(1e-3)
    assert (report.target_size, report.drafter_size) == (words[0].size, words[1].size)


def test_a_share_is_of_a_target_step():
    assert Cost(TRIE, 128, 5, TARGET_STEP / 50, 1.0).share == pytest.approx(0.02)


def test_few_blocks_are_timed_where_the_text_ends(words):
    few = words[0].encode_text(TEXT)[:80]
    report = measure(*words, words[0].decode(few), 1000, (64,), Clock())
    assert 0 < report.costs[0].blocks < 16


def test_too_short_a_text_is_refused(words):
    with pytest.raises(SourceError, match=r"more than 64 tokens of target, got 5 characters; name a longer one"):
        measure(*words, "short", 10, (64,), Clock())


def test_real_texts_leave_both_ways_with_ngrams_to_remember(words):
    target, drafter, spelt = words
    ours, papers = translations(target, drafter, spelt)
    blocks = text_blocks(target, drafter, TEXT, context=30, drafted=5, most=60)
    for block in blocks:
        ours(block)
        papers(block)
    known = {pieces: token for pieces, token in papers.known.items() if spelt.pieces[token] == pieces}
    assert len(known) > 10
    for pieces, token in known.items():
        assert ours.propose(pieces).tokens[0].token == token


def test_prompts_are_joined_until_there_is_enough():
    assert long_text(iter(["abc", "def", "ghi"]), 6) == "abc\n\ndef"
    assert long_text(iter(["abc", "def"]), 1000) == "abc\n\ndef"
    taken = iter(["abc" * 10, "never read"])
    long_text(taken, 5)
    assert next(taken) == "never read"


def run(*arguments: str):
    app = Typer()
    app.command()(bench_translate)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.jsonl"
    rows = [json.dumps({"prompt": text}) for text in sentences(0, 250)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_the_command_prints_a_table(tokenizers: dict[str, Path], prompts: Path):
    done = run(str(tokenizers["target"]), str(tokenizers["drafter"]), "--text", str(prompts), "--blocks", "5")
    assert done.exit_code == 0
    rows = re.findall(r"^ (\S+) +([\d,]+) +5 +([\d,]+) +[\d,]+ +[\d.]+%", done.stdout, re.MULTILINE)
    assert [(way, context) for way, context, _ in rows] == [
        (way, f"{context:,}") for context in CONTEXTS for way in (TRIE, PAPER)
    ]
    assert "share of 30 ms" in done.stdout


def test_the_command_prints_json(tokenizers: dict[str, Path], prompts: Path):
    folders = str(tokenizers["target"]), str(tokenizers["drafter"])
    done = run(*folders, "--text", str(prompts), "--blocks", "3", "--json")
    found = json.loads(done.stdout)
    assert [cost["context"] for cost in found["costs"]] == [128, 128, 512, 512, 2048, 2048]
    assert found["target_step"] == 0.03
    assert all(cost["median"] > 0 for cost in found["costs"])
