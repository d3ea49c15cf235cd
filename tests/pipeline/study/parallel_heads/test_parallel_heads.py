"""The study of parallel heads: what it counts, what it fits, and its command."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import typer
from replaying import config_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)
from typer.testing import CliRunner, Result

from pipeline.cli.bench.heads import study_heads
from pipeline.study.parallel_heads.blocks import BlockCosts, Drafts, best_length, draft_in_passes, tokens_per_block
from pipeline.study.parallel_heads.compare import AS_LOADED, FeatureSets
from pipeline.study.parallel_heads.fitting import DrafterKnowledge, FittedHead, fit_head
from pipeline.study.parallel_heads.places import OFFSETS, Places
from pipeline.study.parallel_heads.recording import RecordedText, record_texts
from stages.drafting.target_states import FEATURES, SIZE
from stages.models.huggingface import new_llama
from stages.models.language_model import LanguageModel

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VOCABULARY = 12
app = typer.Typer()
app.command("study-heads")(study_heads)
app.command("other")(lambda: None)


def new_drafter() -> LanguageModel:
    return LanguageModel(new_llama(3, vocab_size=VOCABULARY, **SHAPE), "tiny")


def new_text(seed: int, length: int = 40) -> RecordedText:
    """Tokens of one piece and of two, in turn, after a prompt of three pieces."""
    numbers = np.random.default_rng(seed)
    starts = [3 + 3 * (n // 2) + n % 2 for n in range(2 * (length - 3) // 3)]
    pieces = tuple(numbers.integers(0, VOCABULARY, length).tolist())
    return RecordedText(pieces, tuple(starts), numbers.integers(-100, 100, (len(starts), SIZE)).astype(np.int8))


def knowledge_of(drafter: LanguageModel) -> DrafterKnowledge:
    return DrafterKnowledge(drafter, torch.zeros(VOCABULARY, dtype=torch.bool))


def as_loaded(knowledge: DrafterKnowledge, places: Places) -> FittedHead:
    sets = FeatureSets.from_places(knowledge, places)
    width = places.hidden_PW.shape[1] + 1
    return FittedHead(0, sets.with_hidden, knowledge.own, torch.zeros(VOCABULARY, width), 0.0, 0.0)


def draft(drafter: LanguageModel, pieces: list[int], length: int) -> list[int]:
    """Draft as decoding does: the likeliest piece, a pass for each."""
    for _ in range(length):
        logits = drafter.model(torch.tensor([pieces])).logits[0, -1]
        pieces = [*pieces, int(logits.argmax())]
    return pieces[-length:]


@torch.no_grad()
def test_a_pass_per_piece_is_judged_as_if_it_had_drafted():
    drafter = new_drafter()
    texts = [new_text(0), new_text(1)]
    # Half of the pieces are the drafter's own, so that some drafts are right for a while.
    for number, text in enumerate(texts):
        pieces = list(text.pieces)
        for place in range(5, len(pieces)):
            if place % 6:
                pieces[place : place + 1] = draft(drafter, pieces[:place], 1)
        texts[number] = replace(text, pieces=tuple(pieces))
    places = Places.from_texts(drafter, texts)
    drafts = draft_in_passes("", places, as_loaded(knowledge_of(drafter), places), (), OFFSETS)
    expected = []
    for text in texts:
        for start in text.starts:
            wanted = text.pieces[start : start + OFFSETS]
            found = draft(drafter, list(text.pieces[:start]), OFFSETS)
            same = [one == other for one, other in zip(found, wanted, strict=False)]
            expected.append((*same, False).index(False))
    assert drafts.count_accepted(OFFSETS).tolist() == expected
    assert len(set(expected)) > 2


def test_blocks_emit_whole_tokens_and_end_with_the_text():
    """Tokens of one and two pieces in turn: drafts of three right pieces are two tokens, and one more is emitted."""
    text = new_text(0, length=21)
    places = Places.from_texts(new_drafter(), [text, text])
    starts = len(text.starts)
    assert starts == 12
    right = Drafts("", torch.ones(2 * starts, OFFSETS, dtype=torch.bool), (1, 2, 3, 4))
    assert tokens_per_block(right, places, 3) == 3
    assert tokens_per_block(right, places, 1) == 2  # a token of one piece, and the one of two after it
    wrong = Drafts("", torch.zeros(2 * starts, OFFSETS, dtype=torch.bool), (1, 2, 3, 4))
    assert tokens_per_block(wrong, places, 4) == 1
    assert best_length(wrong, places, BlockCosts(2.0, 0.1, 0.1, 0.1)) == (0, 500.0)
    length, speed = best_length(right, places, BlockCosts(2.0, 0.3, 0.1, 0.05))
    assert (length, round(speed, 6)) == (4, round(4000 / (2.0 + 0.3 * 4 * 2 / 3 + 4 * 0.1), 6))
    at_once = replace(right, passes=(1, 1, 1, 1))
    assert best_length(at_once, places, BlockCosts(2.0, 0.3, 0.1, 0.05))[1] == pytest.approx(
        4000 / (2.8 + 0.1 + 3 * 0.05)
    )


def make_places(seed: int, texts: int = 40, pieces: int = 12) -> Places:
    """Places whose later pieces follow from the pieces before them alone; hidden states are noise."""
    torch.manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (texts, pieces + OFFSETS))
    for column in range(1, pieces + OFFSETS):
        rows[:, column] = (5 * rows[:, column - 1] + 3) % VOCABULARY
    count = texts * pieces
    next_PK = torch.stack([rows[:, 1 + k : 1 + k + pieces] for k in range(OFFSETS - 1)], -1).reshape(count, -1)
    last_P1 = rows[:, OFFSETS : OFFSETS + pieces].reshape(count, 1)
    return Places(
        torch.randn(count, 16),
        torch.zeros(count, FEATURES),
        rows[:, :pieces].reshape(count),
        torch.cat([next_PK, last_P1], -1),
        torch.ones(count, OFFSETS, dtype=torch.bool),
        torch.ones(count, dtype=torch.bool),
        torch.arange(texts).repeat_interleave(pieces),
    )


def test_the_previous_piece_repairs_what_the_hidden_state_lacks():
    knowledge = knowledge_of(new_drafter())
    learned, others = make_places(0), make_places(1)
    sets = FeatureSets.from_places(knowledge, learned)
    shares = {}
    for features in (sets.with_hidden, sets.with_previous):
        head = fit_head(learned, 1, features, knowledge.nothing)
        shares[features.__name__] = float(head.right(others).float().mean())
    assert shares["with_previous"] > shares["with_hidden"] + 0.3


def test_a_head_that_nothing_improves_has_no_strength():
    """The prior is always right, so every correction is at best as good."""
    knowledge, places = knowledge_of(new_drafter()), make_places(0)
    sets = FeatureSets.from_places(knowledge, places)

    def know(places: Places, offset: int) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot(places.next_PK[:, offset], VOCABULARY)

    head = fit_head(places, 1, sets.with_hidden, know)
    assert head.strength == 0
    assert bool(head.right(make_places(1)).all())


def test_texts_are_recorded_with_a_state_per_token(tiny_pair: TinyPair):  # noqa: F811
    config = config_of(tiny_pair, draft__costs="estimated", sampling__temperature=0.0, learn__lag=0)
    models, texts = record_texts(config.with_overrides({"source.limit": 4}))
    assert len(texts) == 8, "four of each source"
    for text in texts:
        assert len(text.starts) == len(text.states) <= config.sampling.max_new_tokens
        assert list(text.starts) == sorted(set(text.starts))
        assert text.states.any(axis=1).all()
    places = Places.from_texts(models.drafter, texts)
    assert int(places.first_P.sum()) == sum(len(text.starts) for text in texts)
    assert bool((places.next_PK[:, 0] >= 0).all())
    assert int((places.next_PK[:, 3] < 0).sum()) == 3 * len(texts)


def run_command(pair: TinyPair, *arguments: object) -> Result:
    fixed = ("--target", pair.target, "--drafter", pair.drafter, "--set", "device=cpu", "--max-new-tokens", 12)
    line = [str(word) for word in ("study-heads", pair.sums, *fixed, *arguments)]
    with patch.object(sys, "argv", ["omnidraft", *line]):
        return CliRunner().invoke(app, line)


def test_the_command_compares_all_ways(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    page = tmp_path / "page.md"
    done = run_command(tiny_pair, "--learn-from", 6, "--measure", 3, "--json", "--markdown", page)
    assert done.exit_code == 0, done.output
    accuracy, speed = json.loads(done.stdout)
    names = [row[0] for row in accuracy["rows"]]
    assert names[0] == AS_LOADED
    assert len(set(names)) == len(names) == 14
    assert names == [row[0] for row in speed["rows"]]
    firsts = {row[0]: row[1] for row in accuracy["rows"]}
    assert firsts["one pass per piece, refitted"] == firsts["2 passes, heads: hidden state"]
    assert "| way |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("costs", ["1,2,3", "1,0,2,3", "a,b,c,d"])
def test_costs_that_are_no_costs_are_refused(tiny_pair: TinyPair, costs: str):  # noqa: F811
    done = run_command(tiny_pair, "--costs", costs)
    assert done.exit_code != 0
    assert "--costs must be four numbers above 0" in str(done.exception)


def test_too_few_prompts_are_refused(tiny_pair: TinyPair):  # noqa: F811
    done = run_command(tiny_pair, "--learn-from", 30, "--measure", 30)
    assert "the sources must have 60 usable prompts" in str(done.exception)
