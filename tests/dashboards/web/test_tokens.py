"""The details of each token in a token view, and the file with a selection of completions."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from stream_making import HOSTILE, block_of_every_kind, decision, prompt, stream, write
from tree_making import NODES, make_tree

from dashboards.token_view import choose_offsets
from dashboards.web.queries.tokens import Completion, read_completion, visible
from store.events import DraftSource, Event
from store.query.log_reader import LogReader


def completion(tmp_path: Path, events: list[Event], offset: int = 0) -> Completion:
    with LogReader([write(tmp_path / "run", events)]) as log:
        return read_completion(log, offset)


def test_decisions_are_listed_in_the_order_of_the_text(tmp_path: Path):
    found = completion(tmp_path, [*block_of_every_kind(0), prompt(0)])
    assert [(token.text, token.kinds) for token in found.tokens] == [
        (" the", ("accepted", "opens")),
        (" check", ("accepted", "ngram")),
        (" wrong", ("rejected",)),
        (" right", ("residual",)),
        (" ghost", ("dropped",)),
        (" the", ("accepted", "lookup", "opens")),
        ("↵\n", ("bonus",)),
    ]


def test_the_detail_of_a_residual_names_what_it_replaced(tmp_path: Path):
    found = completion(tmp_path, [*block_of_every_kind(0), prompt(0)])
    assert found.tokens[3].detail.splitlines() == [
        "Drawn after a rejection (residual)",
        "token 71 “ right”",
        "instead of token 70 “ wrong”",
        "drafted as pieces 7 (direct, model)",
        "probability 0.5 by the drafter, 0.4 by the target",
        "accepted with probability 0.8; the draw was 0.9",
        "head's estimate of survival to here 0.75",
        "drafter's entropy 1.5 nats",
        "position 2, block 0, index 2",
        "in service: drafter 0, head 0, cache 0",
    ]


def test_the_detail_of_a_rejection_has_the_raw_probabilities_of_the_models(tmp_path: Path):
    raw = {"target_raw_probability": 0.25, "emitted_raw_probability": 0.5, "target_raw_entropy": 1.25}
    raw |= {"drafter_raw_probability": 0.75, "drafter_raw_entropy": 0.5}
    events = block_of_every_kind(0)
    events[2] = replace(events[2], **raw)
    found = completion(tmp_path, [*events, prompt(0)])
    assert found.tokens[2].detail.splitlines()[-5:-2] == [
        "at temperature 1: 0.75 by the drafter, whose entropy was 0.5 nats",
        "at temperature 1: 0.25 by the target, 0.5 for the token emitted instead",
        "target's entropy at temperature 1: 1.25 nats",
    ]


def test_a_tree_shows_its_path_and_lists_the_other_candidates(tmp_path: Path):
    events = make_tree(NODES, [0.4, 0.6])
    events[0] = replace(events[0], drafter=DraftSource.LOOKUP)
    found = completion(tmp_path, [*events, *make_tree(NODES, [0.75], begin=3, block=1), prompt(0)])
    assert [(token.text, token.kinds) for token in found.tokens] == [
        (" 5", ("accepted", "lookup", "opens")),
        (" 7", ("accepted", "memory")),
        ("↵\n", ("bonus",)),
        ("+2", ("tree",)),
        (" 5", ("rejected", "memory", "opens")),
        (" 999", ("residual",)),
        ("+3", ("tree",)),
    ]
    assert found.tokens[3].detail.splitlines() == [
        "Tree of 4 candidates (own text, memory), 2 accepted",
        "✓ “ 5” target 0.5, estimated 0.5, own text (3 tokens, 2×)",
        "\u2003– “ 6” target 0.25, estimated 0.5, memory (3 tokens, 2×)",
        "\u2003✓ “ 7” target 0.5, estimated 0.5, memory (3 tokens, 2×)",
        "– “ 8” target 0.25, estimated 0.5, memory (3 tokens, 2×)",
        "✓ accepted  ✗ rejected  – alternative  · not judged",
    ]


def test_the_detail_of_a_candidate_has_its_share_of_the_place(tmp_path: Path):
    found = completion(tmp_path, [*make_tree(NODES, [0.4, 0.6]), prompt(0)])
    assert found.tokens[1].detail.splitlines() == [
        "Accepted",
        "token 7 “ 7”",
        "candidate: memory, 3 tokens matched, seen 2 times, estimated chance 0.5",
        "probability 0.5 by the target",
        "accepted for a draw from 0.25 to 0.75; the draw was 0.6",
        "position 1, block 0, index 2",
        "in service: drafter 0, head 0, cache 0",
    ]


@pytest.mark.parametrize(
    ("drafter", "target", "chance"),
    [(0.5, 0.25, "0.5"), (0.5, 0.5, "1"), (0.25, 0.5, "1"), (0.0, 0.5, "0"), (0.5, 0.0, "0"), (0.0, 0.0, "0")],
)
def test_the_chance_is_computed_as_in_the_check(tmp_path: Path, drafter: float, target: float, chance: str):
    row = decision(0, 0, drafter_levels=(drafter,), target_levels=(target,))
    (token,) = completion(tmp_path, [row, prompt(0)]).tokens
    assert f"accepted with probability {chance}; the draw" in token.detail


def test_emitted_characters_are_whole_despite_rejected_tokens_between_them(tmp_path: Path):
    first, second = "é".encode()[:1], "é".encode()[1:]
    rows = block_of_every_kind(0)
    rows[1] = replace(rows[1], emitted_bytes=first)
    rows[2] = replace(rows[2], emitted_bytes=second, proposed_bytes=b"\xff")
    found = completion(tmp_path, [*rows[:3], decision(0, 3, emitted_bytes=b"\xe2"), prompt(0)])
    assert [token.text for token in found.tokens] == [" the", "…", "\ufffd", "é", "…", "\ufffd"]
    assert "bytes c3" in found.tokens[1].detail


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb", "a\tb"),
        ("a\r\n", "a⟨U+000D⟩↵\n"),
        ("\x00\x1b[2J", "⟨U+0000⟩⟨U+001B⟩[2J"),
        ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
        ("\u2066\ufeff", "⟨U+2066⟩⟨U+FEFF⟩"),
        ("👩\u200d🚀 שלום", "👩\u200d🚀 שלום"),
    ],
)
def test_invisible_characters_are_named(text: str, shown: str):
    assert visible(text) == shown


def test_the_first_and_last_prompts_and_those_around_each_drift_are_chosen(tmp_path: Path):
    with LogReader([write(tmp_path / "run", stream())]) as log:
        assert choose_offsets(log) == [0, 29, 33, 34, 59]
        assert choose_offsets(log, 3) == [0, 29, 59]
        assert choose_offsets(log, 0) == []


def test_the_file_is_self_contained_and_hostile_text_is_harmless(tmp_path: Path, page: Any):
    content = HOSTILE.encode()
    tokens = [replace(row, emitted_bytes=content, proposed_bytes=content) for row in block_of_every_kind(0)]
    write(tmp_path / "run", [*tokens, prompt(0, dataset=HOSTILE, prompt_text=HOSTILE)])
    file = tmp_path / "tokens.html"
    command = [sys.executable, "-m", "dashboards.token_view", str(tmp_path / "run"), str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    page.goto(file.as_uri())
    page.urls.clear()  # without the request of the file itself
    page.hover(".tokens .accepted >> nth=0")
    assert "<script>window.hacked" in page.inner_text(".tokens .accepted >> nth=0")
    script = "getComputedStyle(document.querySelector('.tokens .accepted'), '::after').content"
    assert "accepted with probability 0.8" in page.evaluate(script)
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('script, img, link').length") == 0
