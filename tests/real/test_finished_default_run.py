"""The promises of the quickstart about a default run. OMNIDRAFT_RUN may name the folder of a finished one."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from real_models import needs_smollm2
from replaying import table_of

from pipeline.config.settings import load
from pipeline.models.catalog import resolve_name
from stages.engine.models.huggingface import load_tokenizer
from store.query.log_reader import LogReader

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800), needs_smollm2]
MOST_REPEATS = 4  # of four tokens in a row


@pytest.fixture(scope="module")
def run(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a default run whose model was in the cache."""
    if "OMNIDRAFT_RUN" in os.environ:
        return Path(os.environ["OMNIDRAFT_RUN"])
    return replay(tmp_path_factory.mktemp("default") / "run")


def replay(folder: Path, *options: str) -> Path:
    """Replay with a user's threads: tests have one, with which the drafter is cheaper relative to the target."""
    program = "from pipeline.cli.app import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", program, "replay", "--run", str(folder), *options]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


def prompts_of_run(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table_of(run, "prompts").to_pylist()
    return sorted(rows, key=lambda row: int(row["offset"]))


def test_a_real_model_answers_questions_and_then_writes_functions_in_rust(run: Path):
    datasets = [(name, len(list(rows))) for name, rows in groupby(prompts_of_run(run), lambda row: row["dataset"])]
    assert datasets == [("questions", 48), ("rust", 48)]
    assert sum(row["emitted"] for row in prompts_of_run(run)) == 4608
    assert load(run / "config.json").targets == ("smollm2-135m",)


def test_none_of_the_first_twenty_completions_repeats_itself(run: Path):
    tokenizer = load_tokenizer(resolve_name("smollm2-135m"))
    for row in prompts_of_run(run)[:20]:
        ids = tokenizer(row["completion_text"])["input_ids"]
        repeats = Counter(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
        assert max(repeats.values(), default=0) <= MOST_REPEATS, row["completion_text"]


def test_rust_is_the_only_drift(run: Path):
    """How soon it is noticed depends on how much is drafted, and so on the machine's load."""
    (drift,) = [row for row in table_of(run, "drifts").to_pylist() if row["action"] == "recall"]
    assert 44 <= drift["changed_at"] <= drift["offset"]
    assert drift["offset"] >= 48
    assert drift["rate_after"] < 0.6 * drift["rate_before"]
    assert "the acceptance head is reset" in drift["description"]


def test_the_drafter_learns_rust_and_keeps_what_it_knew(run: Path):
    """The shares of the tokens that it predicts: of held-out prompts of the stream, and of the probe's by kind."""
    updates = [row for row in table_of(run, "updates").to_pylist() if row["part"] == "drafter" and row["served"]]
    assert updates[0]["offset"] > 48, "of questions it knows what there is to know"
    assert updates[-1]["acceptance_after"] > 1.2 * updates[-1]["acceptance_baseline"]
    versions = sorted((run / "versions").glob("*/manifest.json"))
    loaded, learned = (json.loads(versions[place].read_text("utf-8"))["metrics"] for place in (0, -1))
    assert learned["upon_rust"] > loaded["upon_rust"]
    assert all(learned[f"upon_{kind}"] > loaded[f"upon_{kind}"] - 0.03 for kind in ("docs", "code"))


def test_the_share_that_the_memory_predicts_rises_falls_with_rust_and_rises_again(run: Path):
    """The quickstart states these shares; the texts are greedy, so that they are nearly the same in all runs."""
    rows = prompts_of_run(run)
    first, second, before, after, last = (
        sum(row["predicted"] for row in part) / sum(row["emitted"] for row in part)
        for part in (rows[:9], rows[9:18], rows[39:48], rows[48:57], rows[-9:])
    )
    assert first < second
    assert after < min(before, last)


def test_a_forward_emits_more_tokens_than_in_the_blocks_that_draw_no_drafts(run: Path):
    """Seconds depend on the other load of the machine, and so does how much is drafted."""
    with LogReader([run]) as log:
        forwards = {row["action"]: row["tokens_per_forward"] for row in log.recipe("policy-values").to_pylist()}
    assert forwards["nothing"] == 1.0
    assert forwards["as run"] > 1.3


def test_the_log_derives_every_decision_again(run: Path):
    with LogReader([run]) as log:
        found = log.check()
    assert (found.mismatches.num_rows, found.miscounts.num_rows) == (0, 0)
    assert found.judged > 1000


def test_the_distilled_drafter_drafts_well_from_the_first_questions_on(run: Path):
    rows = prompts_of_run(run)[:9]
    assert sum(row["accepted"] for row in rows) > 0.6 * sum(row["judged"] for row in rows) > 12
