"""What a token view says of each token, and the file that holds some completions."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from stream_making import HOSTILE, block_of_every_kind, decision, prompt, stream, write

from dashboards.token_view import choose_offsets, render
from dashboards.web.tokens import Completion, read_completion, visible
from store.errors import UsageError
from store.events import Event
from store.query.log_reader import LogReader


def completion(tmp_path: Path, events: list[Event], offset: int = 0) -> Completion:
    with LogReader([write(tmp_path / "run", events)]) as log:
        return read_completion(log, offset)


def test_each_decision_is_told_in_the_order_of_the_text(tmp_path: Path):
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


@pytest.mark.parametrize(
    ("drafter", "target", "chance"),
    [(0.5, 0.25, "0.5"), (0.5, 0.5, "1"), (0.25, 0.5, "1"), (0.0, 0.5, "0"), (0.5, 0.0, "0"), (0.0, 0.0, "0")],
)
def test_the_chance_is_that_of_the_check(tmp_path: Path, drafter: float, target: float, chance: str):
    row = decision(0, 0, drafter_levels=(drafter,), target_levels=(target,))
    (token,) = completion(tmp_path, [row, prompt(0)]).tokens
    assert f"accepted with probability {chance}; the draw" in token.detail


def test_emitted_bytes_come_out_whole_past_rejected_ones(tmp_path: Path):
    first, second = "é".encode()[:1], "é".encode()[1:]
    rows = block_of_every_kind(0)
    rows[1] = replace(rows[1], emitted_bytes=first)
    rows[2] = replace(rows[2], emitted_bytes=second, proposed_bytes=b"\xff")
    found = completion(tmp_path, [*rows[:3], decision(0, 3, emitted_bytes=b"\xe2"), prompt(0)])
    assert [token.text for token in found.tokens] == [" the", "…", "\ufffd", "é", "…", "\ufffd"]


def test_an_offset_without_a_prompt_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="got 7"):
        completion(tmp_path, [prompt(0)], offset=7)


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
def test_what_cannot_be_seen_is_named(text: str, shown: str):
    assert visible(text) == shown


def test_the_first_the_last_and_those_around_each_drift_are_chosen(tmp_path: Path):
    with LogReader([write(tmp_path / "run", stream())]) as log:
        assert choose_offsets(log) == [0, 29, 33, 34, 59]
        assert choose_offsets(log, 3) == [0, 29, 59]
        assert choose_offsets(log, 0) == []


def test_a_run_without_prompts_gives_none(tmp_path: Path):
    with LogReader([write(tmp_path / "run", [])]) as log:
        assert choose_offsets(log) == []
    assert "No prompt has completed yet" in render([], "run")


def test_the_file_needs_nothing_else_and_hostile_text_does_nothing(tmp_path: Path, page: Any):
    content = HOSTILE.encode()
    tokens = [replace(row, emitted_bytes=content, proposed_bytes=content) for row in block_of_every_kind(0)]
    write(tmp_path / "run", [*tokens, prompt(0, dataset=HOSTILE, prompt_text=HOSTILE)])
    file = tmp_path / "tokens.html"
    command = [sys.executable, "-m", "dashboards.token_view", str(tmp_path / "run"), str(file)]
    subprocess.run(command, cwd=ROOT, check=True)
    page.goto(file.as_uri())
    page.asked.clear()  # the file itself
    page.hover(".tokens .accepted >> nth=0")
    assert "<script>window.hacked" in page.inner_text(".tokens .accepted >> nth=0")
    told = "getComputedStyle(document.querySelector('.tokens .accepted'), '::after').content"
    assert "accepted with probability 0.8" in page.evaluate(told)
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('script, img, link').length") == 0


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path):
    command = [sys.executable, "-m", "dashboards.token_view", str(tmp_path), str(tmp_path / "tokens.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"omnidraft: {tmp_path} must be a run's folder")
