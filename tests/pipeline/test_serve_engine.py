"""The engine of a server: whatever is asked beside it, an ask gets what the target alone would give it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_tiny import (
    PATIENCE,
    Told,
    ask_of,
    asked,
    assert_sound,
    models_of,
    plain,
    select,
    serve_config,
    served_all,
    serving,
    texts,
    until,
)
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.loop import UnfitPromptError
from pipeline.serve_engine import LiveEngine
from pipeline.serve_requests import Finish
from pipeline.serve_run import Serving
from store.errors import RunError

LEARNING = {"learn__spacing": "fixed", "learn__interval": 2, "serve__learn_share": 1.0}
SAMPLED = {"temperature": 1.0}


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:  # noqa: F811
    """One server for the tests that look at answers alone; nothing learns."""
    with serving(serve_config(tiny_pair), tmp_path_factory.mktemp("served") / "run") as server:
        yield server


@pytest.fixture
def engine(server: Serving) -> LiveEngine:
    return server.engine


def mixed(engine: LiveEngine, order: random.Random, prompts: list[str]) -> dict[str, Told]:
    """Asks of all kinds at once; the greedy ones by their prompt."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "logprobs": 2},
        {"temperature": 1.3, "top_p": 0.8, "stop": ("and", "more")},
        {"max_new_tokens": 3, "store": False},
    ]
    asks = [(text, kind) for text in prompts for kind in kinds]
    order.shuffle(asks)
    told = [(text, kind, asked(engine, text, **kind)) for text, kind in asks]
    return {text: one.end() for text, kind, one in told if one.end() and not kind}


@pytest.mark.parametrize("learn", ["off", "shadow", "live"])
def test_greedy_asks_are_plain_decoding(tiny_pair: TinyPair, tmp_path: Path, learn: str):  # noqa: F811
    """Many at once, in random order, beside asks of all other kinds, and while the drafter learns."""
    prompts, run = texts(700, 708 if learn == "off" else 703), tmp_path / "run"
    expected = {text: plain(tiny_pair, text) for text in prompts}
    with serving(serve_config(tiny_pair, serve__learn=learn, **LEARNING), run) as server:
        order = random.Random(3)
        first = mixed(server.engine, order, prompts)
        if learn == "live":
            until(lambda: bool(served_all(server.engine, prompts[:1]) and server.engine.figures().drafter_version))
        second = mixed(server.engine, order, prompts)
    for greedy in (first, second):
        assert {text: told.tokens for text, told in greedy.items()} == expected
    assert_sound(run)
    served = {row["drafter_version"] for row in select(run, "SELECT DISTINCT drafter_version FROM decisions")}
    made = {row["drafter_version"] for row in select(run, "SELECT drafter_version FROM updates WHERE served")}
    assert served <= {0} | made, "every version that a decision names is known"
    assert (len(served) > 1) == (learn == "live")
    assert bool(made) == (learn != "off")


FROZEN = {"draft__lookup": False, "draft__adapt": False, "cache__budget_bytes": 1}


@pytest.mark.parametrize("changes", [FROZEN, {"draft__max_draft": 0}], ids=["drafting", "plain"])
def test_a_sampled_ask_with_a_seed_gives_the_same_text_in_any_company(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
):
    """Where nothing that drafts changes: what is drafted decides which of the seed's numbers decide which token."""
    with serving(serve_config(tiny_pair, **changes), tmp_path / "run") as server:
        engine, order = server.engine, random.Random(5)
        alone = asked(engine, "Ann has 3 apples", seed=11, **SAMPLED).tokens
        for _ in range(3):
            others = [asked(engine, text, **SAMPLED) for text in order.sample(texts(700, 720), 4)]
            again = asked(engine, "Ann has 3 apples", seed=11, **SAMPLED)
            assert again.tokens == alone
            assert all(other.end() for other in others)
        assert asked(engine, "Ann has 3 apples", seed=12, **SAMPLED).tokens != alone


@pytest.mark.parametrize("seed", [None, 11])
def test_choices_differ(engine: LiveEngine, seed: int | None):
    def choices() -> list[tuple[int, ...]]:
        told = [asked(engine, "Ann has 3 apples", seed=seed, choice=number, **SAMPLED) for number in range(4)]
        return [one.tokens for one in told]

    assert len(set(choices())) > 1


def test_a_stop_string_cuts_the_text_and_ends_the_row(engine: LiveEngine, tiny_pair: TinyPair):  # noqa: F811
    words = models_of(tiny_pair).target_words
    for text in texts(700, 706):
        tokens = plain(tiny_pair, text)
        whole = words.decode(list(tokens))
        stop = whole[6:9]
        told = asked(engine, text, stop=("never there", stop))
        assert told.text == whole[: whole.index(stop)]
        assert told.finish is Finish.STOP
        assert told.tokens == tokens[: len(told.tokens)]
        assert len(told.tokens) < len(tokens), "nothing is decoded behind it"


def test_the_text_is_that_of_the_tokens_and_none_of_it_comes_twice(
    engine: LiveEngine,
    tiny_pair: TinyPair,  # noqa: F811
):
    words = models_of(tiny_pair).target_words
    for told in served_all(engine, texts(700, 710), **SAMPLED):
        shown = told.tokens[:-1] if told.finish is Finish.STOP else told.tokens
        assert told.text == words.decode(list(shown))


def test_logprobs_come_with_every_token(engine: LiveEngine):
    for most in (0, 3):
        told = asked(engine, "Ann has 3 apples", logprobs=most)
        scores = [one for chunk in told.end().chunks for one in chunk.logprobs]
        assert tuple(score.token for score in scores) == told.tokens
        assert all(score.logprob <= 0 and len(score.top) == most for score in scores)
        if most:
            assert all(score.top[0] == (score.token, score.logprob) for score in scores), "greedy takes the likeliest"
    assert not any(chunk.logprobs for chunk in asked(engine, "Ann has 3 apples").end().chunks)


def test_a_completion_ends_where_the_context_of_the_target_does(server: Serving):
    engine = server.engine
    longest = engine.figures().max_length
    assert longest == server.models.target.max_length
    words = server.models.drafter_words
    text = words.decode(words.encode("Ann has 3 apples and finds 4 more. " * 200)[: longest - 30])
    prompt = engine.encode(text)
    told = asked(engine, text, max_new_tokens=10 * longest, temperature=2.0)
    room = longest - len(prompt.tokens)
    assert told.usage.emitted == room if told.finish is Finish.LENGTH else told.usage.emitted < room
    assert len(prompt.pieces) + told.usage.emitted > server.models.drafter.max_length, "the drafter had no room left"


def test_prompts_that_do_not_fit_are_refused_when_they_are_encoded(engine: LiveEngine):
    text = "Ann " * 2000
    with pytest.raises(UnfitPromptError, match="must have 1 to"):
        engine.encode(text)
    with pytest.raises(UnfitPromptError):
        engine.encode_chat([{"role": "user", "content": text}])


def test_a_cancelled_ask_gives_its_place_free_within_a_block(server: Serving):
    held = Told(hold=2)
    cancel = server.engine.submit(ask_of(server.engine, "Ann has 3 apples", max_new_tokens=100), held)
    beside = asked(server.engine, "Tom has 4 pencils", max_new_tokens=60)
    assert held.reached.wait(PATIENCE)
    cancel()
    held.go.set()
    assert held.finish is Finish.CANCELLED
    assert held.usage.blocks == 2, "the block in which it was cancelled was its last"
    assert len(held.tokens) == held.usage.emitted > 0
    beside.end()
    until(lambda: server.engine.figures().running == 0)
    assert server.models.target._order == server.models.drafter._order == []
    cancel()  # after the end: harmless
    assert held.finishes == [Finish.CANCELLED]


def test_a_deadline_ends_an_ask_in_flight(engine: LiveEngine):
    held = Told(hold=1)
    engine.submit(ask_of(engine, "Ann has 3 apples", max_new_tokens=100, seconds=0.3), held)
    assert held.reached.wait(PATIENCE)
    late = asked(engine, "Tom has 4 pencils", seconds=1e-9)
    held.ended.wait(0.4)  # the engine is held all the while
    held.go.set()
    assert held.finish is Finish.DEADLINE
    assert held.usage.blocks >= 1
    assert late.finish is Finish.DEADLINE
    assert late.usage.blocks == 0


def test_usage_adds_up_with_the_log(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    with serving(serve_config(tiny_pair), run) as server:
        prompts = texts(700, 708)
        told = [
            asked(server.engine, text, name=f"p{number}", store=number % 3 > 0, temperature=number % 2)
            for number, text in enumerate(prompts)
        ]
        usages = {f"p{number}": one.end().usage for number, one in enumerate(told)}
    counts = "prompt_tokens AS prompt, emitted, blocks, drafted + lookup_drafted AS drafted"
    rows = select(run, f"SELECT prompt_id, {counts}, accepted + lookup_accepted AS accepted FROM prompts")
    assert {row.pop("prompt_id"): row for row in rows} == {name: vars(usage) for name, usage in usages.items()}
    blocks = select(run, 'SELECT prompt_id, count(*) AS blocks FROM blocks JOIN prompts USING ("offset") GROUP BY ALL')
    assert {row["prompt_id"]: row["blocks"] for row in blocks} == {name: one.blocks for name, one in usages.items()}
    assert_sound(run)


def test_a_stage_that_breaks_ends_all_asks_and_is_said_so(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """What was committed stands: the run is gone on with."""
    run, notes = tmp_path / "run", []

    def breaks(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no numbers any more")

    def serve_until_it_breaks() -> None:
        with serving(serve_config(tiny_pair), run, notes=notes) as server:
            assert asked(server.engine, "Ann has 3").end().usage.emitted
            monkeypatch.setattr(server.models.target, "forward", breaks)
            told = [asked(server.engine, text) for text in texts(700, 702)]
            assert {one.finish for one in told} == {Finish.FAILED}
            until(lambda: not server.engine.figures().ready)

    with pytest.raises(RunError, match="no numbers any more"):
        serve_until_it_breaks()
    assert any("no numbers any more" in note for note in notes)
    with serving(serve_config(tiny_pair), run, resume=True) as server:
        assert asked(server.engine, "Ann has 3").end().usage.emitted
    assert_sound(run)
