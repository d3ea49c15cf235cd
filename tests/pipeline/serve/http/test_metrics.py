"""Metrics of `omnidraft serve` at `/metrics`."""

from dataclasses import replace

from event_making import make_drifted
from prometheus_client.parser import text_string_to_metric_families
from serving_doubles import MODEL, ScriptedEngine, run_http_server

from pipeline.serve.http.metrics import Metrics
from pipeline.serve.messages import EngineStatus
from store.events import (
    BlockDone,
    DraftSource,
    PromptRejected,
    Recalled,
    Updated,
)

STATUS = EngineStatus(MODEL, True, 2, 3, 11, 12, 4, 6, 7, True, 4000)
BLOCK = BlockDone(0, "live", 0, 1, drafted=6, proposed=5, judged=4, accepted=3, emitted=4, seconds_decode=0.0,
                  seconds_translate=0.0, seconds_verify=0.0)  # fmt: skip


def samples(metrics: Metrics, status: EngineStatus = STATUS) -> dict[str, float]:
    """Return values by name and labels, without the label of the model, which all have."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(status).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[" ".join([sample.name, *(labels[name] for name in sorted(labels))])] = sample.value
    return found


def test_blocks():
    metrics = Metrics(MODEL)
    metrics.count_event(BLOCK)
    metrics.count_event(
        replace(BLOCK, drafted=2, proposed=2, judged=2, accepted=2, emitted=3, drafter=DraftSource.LOOKUP)
    )
    memory = {"judged": 2, "accepted": 1, "emitted": 2, "drafter": DraftSource.MEMORY, "candidates": 8}
    metrics.count_event(replace(BLOCK, drafted=8, proposed=8, **memory))
    metrics.count_event(replace(BLOCK, drafted=0, proposed=0, judged=0, accepted=0, emitted=1))
    metrics.count_event(PromptRejected("live", 1, "too long"))  # no metric counts it
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 15
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 6
    positions = [found.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total {position}") for position in range(4)]
    assert positions == [3, 2, 1, None]
    assert (found["omnidraft:blocks_total"], found["omnidraft:emitted_tokens_total"]) == (4, 10)
    by_source = {
        name: [found[f"omnidraft:{name}_total {source}"] for source in ("model", "lookup", "memory")]
        for name in ("drafted_pieces", "drafted_blocks", "judged_tokens", "accepted_tokens")
    }
    assert by_source == {
        "drafted_pieces": [6, 2, 8], "drafted_blocks": [1, 1, 1], "judged_tokens": [4, 2, 2],
        "accepted_tokens": [3, 2, 1],
    }  # fmt: skip
    assert found["omnidraft:acceptance_rate"] == 3 / 4  # of the model alone
    assert found["omnidraft:block_efficiency"] == 10 / 4


def test_learning_and_drift():
    metrics = Metrics(MODEL)
    update = Updated(0, MODEL, "drafter", "trie", 1.0, 5, 0.5, 0.6, 0.4, 1.0, True, "", 1.0, 0.0, 1, 0)
    for event in (update, update, replace(update, served=False), replace(update, part="head")):
        metrics.count_event(event)
    metrics.count_event(make_drifted(target=MODEL, action="reset"))
    metrics.count_event(Recalled(0, MODEL, None, 2, 5, 0.5, 0.4, 1.0))
    found = samples(metrics)
    assert found["omnidraft:updates_total drafter true"] == 2
    assert found["omnidraft:updates_total drafter false"] == 1
    assert found["omnidraft:updates_total head true"] == 1
    assert found["omnidraft:drifts_total reset"] == 1
    assert found["omnidraft:recalls_total false"] == 1


def test_metrics_of_requests():
    with run_http_server(ScriptedEngine()) as served, served.client() as client:
        client.completions.create(model=MODEL, prompt="abcd", n=2)  # five tokens, three blocks each
        list(client.completions.create(model=MODEL, prompt="abcd", max_tokens=2, stream=True))
        client._client.get(f"{served.url}/nowhere")
        answer = client._client.get(f"{served.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(served.metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 4
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"]) == (12, 12)
    assert (found["vllm:request_success_total stop"], found["vllm:request_success_total length"]) == (2, 1)
    assert (found["omnidraft:http_responses_total 200"], found["omnidraft:http_responses_total 404"]) == (3, 1)
