"""Prompts that are longer than the drafter's context, which is often shorter than the target's."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from replaying import config_of, run_replay, table_of
from tiny_pair import TinyPair

from pipeline.assembly.admission import Admission, find_fault
from pipeline.assembly.models import Models, load_models
from store.events import PromptReceived

CONTEXT = 40  # pieces of the drafter
LONG = "Ann has 3 apples and Tom has 4 pencils. " * 6


@pytest.fixture
def pair(tiny_pair: TinyPair, tmp_path: Path) -> TinyPair:
    """A drafter whose context is shorter than the prompts."""
    drafter = shutil.copytree(tiny_pair.drafter, tmp_path / "drafter")
    path = drafter / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": CONTEXT}))
    return replace(tiny_pair, drafter=drafter)


@pytest.fixture
def models(pair: TinyPair, tmp_path: Path) -> Models:
    (found,) = load_models(config_of(pair), "", tmp_path)
    return found


def prompt_of(text: str) -> PromptReceived:
    return PromptReceived(0, "p", "long", 1, text)


def test_the_target_reads_all_and_the_drafter_the_end(models: Models, pair: TinyPair):
    row = Admission(config_of(pair), models).admit(prompt_of(LONG))
    assert row.tokens == models.target_vocabulary.encode(LONG)
    pieces = models.drafter_vocabulary.encode(LONG)
    assert CONTEXT // 4 < len(row.pieces) <= CONTEXT // 2
    assert row.pieces == pieces[-len(row.pieces) :]
    short = Admission(config_of(pair), models).admit(prompt_of("Ann has"))
    assert short.pieces == models.drafter_vocabulary.encode("Ann has"), "BOS included"


def test_prompts_that_begin_alike_are_cut_alike(models: Models):
    """They share keys and values: the beginning of what is read moves by quarters of the context."""
    begins = [models.clip_prompt(list(range(length)))[0] for length in range(1, 61)]
    assert begins == [0] * 20 + [10] * 10 + [20] * 10 + [30] * 10 + [40] * 10


def test_a_prompt_that_the_target_cannot_complete_is_refused(models: Models, pair: TinyPair):
    most = models.target.max_length - config_of(pair).sampling.max_new_tokens - 1
    words = LONG.split()
    texts = [" ".join((words * most)[:number]) for number in range(most // 2, most + 1)]
    admission = Admission(config_of(pair), models)
    fits = [text for text in texts if len(models.target_vocabulary.encode(text)) <= most]
    assert len(admission.admit(prompt_of(fits[-1])).tokens) <= most
    refused = next(text for text in texts if len(models.target_vocabulary.encode(text)) > most)
    fault = find_fault(prompt_of(refused), [admission])
    assert fault is not None
    assert fault.startswith(f"the prompt p must have 1 to {most} of the target's tokens, got ")
    assert find_fault(prompt_of("Ann has"), [admission]) is None


def test_long_prompts_are_drafted_for_and_their_texts_are_those_of_plain_decoding(pair: TinyPair, tmp_path: Path):
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps({"prompt": LONG + f"Tom has {number}"}) + "\n" for number in range(4)))
    changes = {"sources": (str(source),), "draft__sources": ("model",), "draft__pause": False}
    changes["sampling__max_new_tokens"] = 2 * CONTEXT
    summary = run_replay(config_of(pair, **changes), tmp_path / "run")
    run_replay(config_of(pair, **changes | {"draft__max_draft": 0}), tmp_path / "plain")
    assert summary["rejected_rows"] == 0
    texts, plain = (
        sorted((row["offset"], row["completion_text"]) for row in table_of(tmp_path / name, "prompts").to_pylist())
        for name in ("run", "plain")
    )
    assert texts == plain
    decisions = table_of(tmp_path / "run", "decisions").to_pylist()
    emitted = Counter(row["offset"] for row in decisions if row["emitted_id"] is not None)
    assert max(emitted.values()) > CONTEXT, "in the end there is no space for drafts"
    drafted = {row["offset"] for row in decisions if row["drafter"] == "model"}
    assert drafted == {0, 1, 2, 3}
