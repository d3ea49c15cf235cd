"""SmolLM2-135M-Instruct as target of the built-in drafter, through the whole pipeline.

It is the file that `omnidraft zoo smollm2-135m` fetches; `transformers` with the same weights is the reference.
"""

import json
from collections import Counter
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import config_for, encode, generate, load_plain, needs_smollm2
from replaying import run_replay, table_of
from scipy.stats import chi2
from starlette.testclient import TestClient

from benchmarks.studies.messages import collect_messages
from pipeline.assembly import probe
from pipeline.assembly.models import load_models
from pipeline.assembly.probe import examples_of, probe_of
from pipeline.serve.http.api import make_app
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.run import ServerRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_smollm2]

NEW_TOKENS = 16
SAMPLES = 256
OPENING = "The days of the week are Monday,"
QUESTION = "What is the capital of France?"


@cache
def expect_greedy(name: str, prompts: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The completions of chat prompts by `generate`."""
    return generate(name, [encode(name, prompt, chat=True) for prompt in prompts], NEW_TOKENS)


def write_prompts(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    return path


def emitted_by(run: Path) -> dict[int, tuple[int, ...]]:
    """The completion of every prompt, by its offset."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for row in table_of(run, "decisions").to_pylist():
        if row["emitted_id"] is not None:
            found.setdefault(row["offset"], []).append((row["block"], row["index"], row["emitted_id"]))
    return {offset: tuple(token for *_, token in sorted(rows)) for offset, rows in sorted(found.items())}


def rows_by_offset(run: Path, table: str) -> list[dict[str, Any]]:
    return sorted(table_of(run, table).to_pylist(), key=lambda row: row["offset"])


@pytest.mark.representatives("4")
@pytest.mark.parametrize("every", [4, 1])
def test_the_shipped_examples_of_the_probe_are_those_that_the_target_makes(
    smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
):
    config = config_for([smollm2], [tmp_path / "none.jsonl"], drafter="builtin:drafter-4m", weights="auto")
    (models,) = load_models(config, "", tmp_path)
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "empty"))
    with collect_messages() as lines:
        shipped = [one for one in examples_of(config, models) if one.offset % every == 0]
    assert [line for line in lines if "probe" in line] == [], "they were made"
    some = probe.prompts()[::every]
    monkeypatch.setattr(probe, "SHIPPED", None)
    monkeypatch.setattr(probe, "prompts", lambda: some)
    made = examples_of(config, models)
    assert len(made) == len(some)
    assert [one.pieces for one in shipped] == [one.pieces for one in made]
    scores = [probe_of(models, found, config.batch)().metrics for found in (shipped, made)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.representatives("4")
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_chats_equal_generate_while_the_drafter_learns(
    smollm2: str, questions: list[Path], tmp_path: Path, batch: int
):
    config = config_for([smollm2], questions, batch=batch, sampling__max_new_tokens=NEW_TOKENS)
    run_replay(config, tmp_path)
    prompts = rows_by_offset(tmp_path, "prompts")
    assert len(prompts) == 12
    assert len({row["dataset"] for row in prompts}) == 4
    found = emitted_by(tmp_path)
    expected = expect_greedy(smollm2, tuple(row["prompt_text"] for row in prompts))
    assert {offset: ids for offset, ids in found.items() if ids != expected[offset]} == {}
    assert sum(row["accepted"] for row in prompts) > 0
    assert prompts[-1]["drafter_version"] > 0, "an update was served"
    assert [row for row in table_of(tmp_path, "updates").to_pylist() if row["part"] == "drafter" and row["served"]]


def list_bins(name: str, prompt: str, smallest: float) -> dict[tuple[int, ...], float]:
    """Return probabilities at temperature 1 of the first two tokens: of the pairs that have at least `smallest`; of a
    first token with any other second token; and, under the empty tuple, of the rest."""
    model, ids = load_plain(name)[0], encode(name, prompt, chat=False)
    with torch.inference_mode():
        first_V = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        likely_N = (first_V >= smallest).nonzero()[:, 0].tolist()
        both_NT = torch.tensor([[*ids, token] for token in likely_N])
        second_NV = model(both_NT).logits[:, -1].double().softmax(-1)
    bins: dict[tuple[int, ...], float] = {}
    for token, second_V in zip(likely_N, second_NV, strict=True):
        joint_V = first_V[token] * second_V
        pairs = {(token, other): float(joint_V[other]) for other in (joint_V >= smallest).nonzero()[:, 0].tolist()}
        others = float(first_V[token]) - sum(pairs.values())
        bins |= pairs | ({(token,): others} if others >= smallest else {})
    return bins | {(): 1 - sum(bins.values())}


def find_bin(tokens: tuple[int, ...], bins: Container[tuple[int, ...]]) -> tuple[int, ...]:
    return next(key for key in (tokens, tokens[:1], ()) if key in bins)


@pytest.mark.sweep
def test_two_sampled_tokens_have_the_target_s_distribution(smollm2: str, tmp_path: Path):
    """Pearson's test over all pairs of tokens expected five times or more; other pairs count by their first token."""
    source = write_prompts(tmp_path / "same.jsonl", [OPENING] * SAMPLES)
    config = config_for(
        [smollm2], [source], batch=16, sampling__temperature=1.0, sampling__max_new_tokens=2, source__chat=False,
        learn__interval=32,
    )  # fmt: skip
    run_replay(config, tmp_path / "run")
    bins = list_bins(smollm2, OPENING, 5 / SAMPLES)
    assert len(bins) >= 12
    seen = Counter(find_bin(tokens, bins) for tokens in emitted_by(tmp_path / "run").values())
    assert seen.total() == SAMPLES
    statistic = sum((seen[key] - SAMPLES * share) ** 2 / (SAMPLES * share) for key, share in bins.items())
    assert chi2.sf(statistic, len(bins) - 1) > 1e-3
    rows = table_of(tmp_path / "run", "prompts").to_pylist()
    assert sum(row["accepted"] for row in rows) > 10, "drafts were accepted, and others rejected"
    assert sum(row["judged"] - row["accepted"] for row in rows) > 10


def test_a_server_answers_a_chat(smollm2: str, tmp_path: Path):
    config = config_for([smollm2], ["-"], batch=2, serve__learn="off")
    metrics = Metrics(smollm2)
    with ServerRun(config, tmp_path / "run", metrics.count_event) as server:
        client = TestClient(make_app(server.engine, Limits(), metrics), base_url="http://127.0.0.1")
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": smollm2, "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS}
        answer = client.post("/v1/chat/completions", json=body).json()
    tokenizer = load_plain(smollm2)[1]
    expected = tokenizer.decode(expect_greedy(smollm2, (QUESTION,))[0], skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == expected
    assert "Paris" in expected
    assert answer["choices"][0]["finish_reason"] == "stop"
