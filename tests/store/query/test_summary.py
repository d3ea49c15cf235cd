import json

import pytest
from event_making import make_published
from synthetic_runs import block, make_drift, make_update, prompt, small_run_events, write_run

from store.events import Recalled
from store.query.summary import summarize, write_summary


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return summarize(write_run(tmp_path_factory.mktemp("runs") / "small", small_run_events()))


def test_datasets_come_in_stream_order(tmp_path):
    events = [prompt(offset=0, dataset="zebra"), prompt(offset=1, dataset="ant")]
    assert list(summarize(write_run(tmp_path, events))["datasets"]) == ["zebra", "ant"]


def test_counts_and_rates_of_a_dataset(small):
    docs = small["datasets"]["docs"]
    assert (docs["prompts"], docs["emitted_tokens"], docs["target_forwards"]) == (10, 40, 20)
    assert docs["acceptance_rate"] == round((8 * 2 + 2 * 3) / 30, 4)
    assert docs["mean_accepted_length"] == 1.1  # 22 accepted in 20 blocks
    assert docs["block_efficiency"] == 2.0
    assert docs["seconds"] == {"decode": 5.0, "translate": 2.5, "verify": 10.0, "learn": 0.5}


def test_drifts_and_versions_go_to_their_dataset_and_to_the_totals(small):
    docs, code = small["datasets"]["docs"], small["datasets"]["code"]
    assert docs["drifts"] == []
    assert code["drifts"] == [
        {
            "target": "big",
            "offset": 12,
            "action": "reset",
            "rate_before": 0.75,
            "rate_after": 0.25,
            "description": make_drift().description,
        }
    ]
    assert [version["version"] for version in docs["versions"]] == [0, 1]
    assert code["versions"] == [{"target": "big", "version": 2, "offset": 12, "reason": "drift"}]
    assert [drift["dataset"] for drift in small["totals"]["drifts"]] == ["code"]
    assert len(small["totals"]["versions"]) == 3


def test_totals_add_up(small):
    totals = small["totals"]
    assert (totals["prompts"], totals["emitted_tokens"], totals["wall_seconds"]) == (15, 60, 15.0)
    assert totals["acceptance_rate"] == 0.6  # 22 + 5 of 45
    assert totals["seconds"]["learn"] == 0.75
    assert small["rejected_rows"] == 1
    assert small["run"] == "small"


def test_the_ledger_has_the_cost_of_learning_and_the_seconds_that_it_saved(small):
    """Updates take 0.5 s and 0.25 s, scores 0.5 s, a target forward 0.5 s; 6 - 2.5 tokens are gained."""
    assert small["totals"]["ledger"] == {
        "updates": 2,
        "served": 1,
        "heads": 0,
        "idle_seconds": 0.0,
        "update_seconds": 0.75,
        "waited_seconds": 0.5,
        "tokens_gained": 3.5,
        "recall_seconds": 0.5,
        "seconds_per_target_forward": 0.5,
        "seconds_saved": 1.75,
        "net_seconds": 0.5,
        "predicted_loaded": 0.25,
        "predicted": 0.5,
    }


def test_the_ledger_counts_the_scores_of_earlier_versions(tmp_path):
    events = [block(seconds_verify=0.5), prompt(), make_update(seconds=2.0, tokens_gained=8.0)]
    recalls = [Recalled(number, "big", None, 2, 4, 0.5, 0.5, 0.25) for number in (1, 2)]
    ledger = summarize(write_run(tmp_path, [*events, *recalls]))["totals"]["ledger"]
    assert (ledger["recall_seconds"], ledger["seconds_saved"], ledger["net_seconds"]) == (0.5, 4.0, 1.5)


def test_every_target_has_its_own_metrics(tmp_path):
    """Prompts alternate between the targets; the acceptance of the second rises, that of the first does not."""
    events = [make_published(target="big"), make_published(target="small", version=1)]
    for number in range(12):
        target = ("big", "small")[number % 2]
        place = {"offset": number, "started": float(number), "finished": number + 1.0}
        events.append(prompt(**place, target=target, accepted=1 if target == "big" else number // 4))
    events += [
        make_drift(offset=7, target="small", dataset="docs"),
        make_published(offset=7, target="small", version=2, parent=1, reason="drift"),
    ]
    targets = summarize(write_run(tmp_path, events))["targets"]
    assert list(targets) == ["big", "small"]
    assert [targets[name]["prompts"] for name in targets] == [6, 6]
    assert (targets["big"]["acceptance_rate"], targets["small"]["acceptance_rate"]) == (0.3333, round(6 / 18, 4))
    fifths = [targets["small"][part]["acceptance_rate"] for part in ("first_fifth", "last_fifth")]
    assert fifths == [0.0, round(2 / 3, 4)], "a fifth has two prompts"
    assert targets["small"]["block_efficiency"] == 2.0
    assert (targets["big"]["drifts"], [drift["offset"] for drift in targets["small"]["drifts"]]) == ([], [7])
    assert [[version["version"] for version in targets[name]["versions"]] for name in targets] == [[0], [1, 2]]


def test_overlapping_prompts_share_the_clock(tmp_path):
    """The first runs alone for 4 s, then both for 4 s: 4 + 2 seconds for the first, 2 for the second, 8 in total."""
    events = [
        prompt(offset=0, dataset="docs", started=0.0, finished=8.0, emitted=12),
        prompt(offset=1, dataset="code", started=4.0, finished=8.0, emitted=12),
    ]
    summary = summarize(write_run(tmp_path, events))
    assert [summary["datasets"][name]["wall_seconds"] for name in ("docs", "code")] == [6.0, 2.0]
    assert [summary["datasets"][name]["tokens_per_second"] for name in ("docs", "code")] == [2.0, 6.0]
    assert summary["totals"]["wall_seconds"] == 8.0
    assert summary["totals"]["tokens_per_second"] == 3.0


def test_learning_between_two_prompts_slows_the_tokens(tmp_path):
    events = [
        prompt(offset=0, started=0.0, finished=1.0),
        make_update(offset=0, seconds=3.0),
        prompt(offset=1, started=4.0, finished=5.0),
    ]
    docs = summarize(write_run(tmp_path, events))["datasets"]["docs"]
    assert docs["wall_seconds"] == 5.0
    assert docs["tokens_per_second"] == 1.6
    assert docs["last_fifth"]["tokens_per_second"] == 1.0


def test_nothing_judged_gives_null_and_not_nan(tmp_path):
    run = write_run(tmp_path, [prompt(judged=0, accepted=0, blocks=0, emitted=0, finished=0.0)])
    text = json.dumps(write_summary(run), allow_nan=False)
    docs = json.loads(text)["datasets"]["docs"]
    assert docs["acceptance_rate"] is docs["block_efficiency"] is docs["tokens_per_second"] is None


def test_the_file_holds_the_same_metrics(tmp_path):
    run = write_run(tmp_path, small_run_events())
    summary = write_summary(run)
    assert json.loads((run / "summary.json").read_bytes()) == summary


def test_the_answers_are_a_file(tmp_path):
    events = [prompt(offset=0, finish="length"), prompt(offset=1, finish="stop")]
    run = write_run(tmp_path, events)
    summary = write_summary(run)
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [answer["finish"] for answer in answers] == ["length", "stop"]
    assert answers[0].keys() == {"dataset", "prompt_id", "prompt", "text", "finish"}
    assert answers[1]["prompt"] == events[1].prompt_text
    assert answers[1]["text"] == events[1].completion_text
    assert summary["totals"]["ended_by_length"] == 1
