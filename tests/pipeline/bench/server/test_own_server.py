"""The load generator with servers of ours that it starts itself, and its reports of wrong answers."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from serving_doubles import wait_until

from pipeline.bench.server.benchmark import LoadPlan, load_server, prompts_of
from pipeline.bench.server.client import LoadRequest, Outcome, Workload, requests
from pipeline.bench.server.server import OwnServer, processes
from pipeline.bench.server.verify import Reference, verify
from pipeline.config.settings import Config
from store.errors import RunError

pytestmark = pytest.mark.usefixtures("forked")
WORKLOAD = Workload(max_tokens=(4, 8), leave=0.2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(Config(), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return prompts_of(Config().with_overrides({"source.limit": 6}))


@pytest.mark.slow
def test_a_server_is_started_loaded_and_ended(tmp_path: Path, prompts: list[str], reference: Reference):
    options = ["--learn", "off", "--set", "serve.waiting=2", "--set", "batch=2"]
    with OwnServer(options, tmp_path, tmp_path / "runs" / "run") as server:
        plan = LoadPlan(clients=6, seconds=3.0, warm_up=0.0, workload=WORKLOAD, seed=0)
        loaded = load_server(server.url, None, server.pid, prompts, plan, lambda _: None)
    assert processes(server.pid) == []
    assert loaded.model == Config().targets[0]
    assert [outcome.error for outcome in loaded.load.outcomes if outcome.error] == []
    assert sum(outcome.refused for outcome in loaded.load.outcomes) > 0  # six clients, and room for four
    assert all(sample.memory for sample in loaded.samples)
    assert loaded.samples[-1].figures["generated"] > 0
    found = verify(loaded.load.outcomes, reference, lambda done, all_: None)
    assert found.answers > 0
    assert found.differing == []


@pytest.mark.slow
def test_a_paused_server_resumes(tmp_path: Path):
    with OwnServer(["--learn", "off"], tmp_path, tmp_path / "runs" / "run") as server:
        server.pause()
        wait_until(lambda: {process.status() for process in processes(server.pid)} == {"stopped"})
        server.resume()
        wait_until(lambda: "stopped" not in {process.status() for process in processes(server.pid)})
        server.pause()  # a paused server must still end
    assert processes(server.pid) == []


def test_a_server_that_cannot_start_reports_why(tmp_path: Path):
    server = OwnServer(["--target", "no-such-model"], tmp_path, tmp_path / "runs" / "run")
    with pytest.raises(RunError, match="no-such-model"), server:
        pass


def complete_plainly(request: LoadRequest, reference: Reference) -> Outcome:
    """The right answer, from the reference."""
    prompt = reference.encode(request.chat, request.prompt)
    (tokens,) = reference.complete([prompt], request.max_tokens)
    finish = "stop" if tokens[-1] in reference.eos_ids else "length"
    return Outcome(request, text=reference.decode(tokens), tokens=len(tokens), finish=finish)


def test_right_answers_do_not_differ_whatever_their_length(reference: Reference, prompts: list[str]):
    wanted = [replace(one, temperature=0.0) for one in islice(requests(prompts[:2], Workload(max_tokens=(3, 9)), 0), 8)]
    found = verify([complete_plainly(one, reference) for one in wanted], reference, lambda done, all_: None)
    assert (found.answers, found.differing) == (8, [])
    assert found.prompts == 2  # chats without a template are the same to the model


def test_a_wrong_answer_is_found_with_its_margin(reference: Reference, prompts: list[str]):
    right = complete_plainly(LoadRequest(7, prompts[0], False, False, 0.0, 8), reference)
    tokens = reference.complete([reference.encode(False, prompts[0])], 8)[0]
    begin = reference.words.decode(tokens[:3])
    other = next(
        text for text in (b" zebra", b" nine", b"\nQ") if not right.text[len(begin) :].encode().startswith(text[:2])
    ).decode()
    wrong = replace(right, text=begin + other)
    sampled = replace(wrong, request=replace(right.request, temperature=1.0))
    failed = replace(wrong, error="500")
    found = verify([right, wrong, sampled, failed], reference, lambda done, all_: None)
    assert found.answers == 2
    (difference,) = found.differing
    assert (difference.number, difference.place, difference.got) == (7, 3, other)
    assert difference.expected == reference.words.decode(tokens[3:4])
    assert difference.margin is not None
    assert difference.margin > 0  # what is expected is the likeliest of all


def test_an_answer_that_ends_too_early_is_found(reference: Reference, prompts: list[str]):
    right = complete_plainly(LoadRequest(0, prompts[0], False, False, 0.0, 8), reference)
    short = replace(right, text="", tokens=1, finish="stop")
    (difference,) = verify([short], reference, lambda done, all_: None).differing
    assert (difference.place, difference.got) == (0, "")
    assert difference.margin is not None
    assert difference.margin > 0
