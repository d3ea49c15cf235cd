"""Prompts that are too long for the models are refused by their number of characters, before they are tokenised."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_tiny import submit_prompt

from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from pipeline.serve.engine import LiveEngine
from pipeline.serve.run import ServerRun, make_conversation
from stages.vocabulary.spelling import TextTokenizer

PAIR = {"targets": ("builtin:target-7m",), "drafter": "builtin:drafter-1.6m"}
REST = {"publish.enabled": False, "serve.learn": "off", "device": "cpu", "threads": 1}
CHATML = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
LONG = ["a" * 900_000, " " * 900_000, "def add return for " * 47_000, "é" * 60_000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:
    """The built-in pair with its real tokenizers."""
    run = tmp_path_factory.mktemp("served") / "run"
    with ServerRun(Config().with_overrides({**PAIR, **REST}), run, lambda event: None) as server:
        yield server


@pytest.fixture
def engine(server: ServerRun) -> LiveEngine:
    return server.engine


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every text that a tokenizer receives."""
    given: list[str] = []
    cut = TextTokenizer.tokenize

    def record_cut(self: TextTokenizer, text: str) -> list[int]:
        given.append(text)
        return cut(self, text)

    monkeypatch.setattr(TextTokenizer, "tokenize", record_cut)
    return given


def longest_of_all(server: ServerRun) -> str:
    """Return the longest text of one repeated token that the target can take."""
    target = server.models.target_vocabulary
    most = server.models.target.max_length - 1
    token = max((data.decode(errors="ignore") for data in target.token_bytes if data), key=len)
    return token * next(number for number in range(most, 0, -1) if len(target.encode(token * number)) <= most)


@pytest.mark.slow
@pytest.mark.parametrize("text", LONG, ids=["letters", "spaces", "words", "accents"])
def test_a_prompt_that_cannot_fit_is_never_tokenised(engine: LiveEngine, cuts: list[str], text: str):
    with pytest.raises(UnfitPromptError, match=r"must have 1 to 1023 of the target's tokens, got [0-9]+ or more$"):
        engine.encode(text)
    with pytest.raises(UnfitPromptError, match=r"must have 1 to 1023 of the target's tokens, got [0-9]+ or more$"):
        engine.encode_chat([{"role": "user", "content": text[:500_000]}, {"role": "user", "content": text[500_000:]}])
    assert cuts == []


def test_a_conversation_by_a_template_is_refused_before_it_is_tokenised(
    server: ServerRun,
    engine: LiveEngine,
    cuts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML, encoding="utf-8")
    config = server.config.with_overrides({"source.chat_template": path})
    monkeypatch.setattr(engine, "_conversation", make_conversation(config.source, server.models))
    cuts.clear()
    messages = [{"role": "user", "content": "def add return for " * 400}] * 100
    with pytest.raises(UnfitPromptError, match=r"must have 1 to 1023 of the target's tokens, got [0-9]+ or more$"):
        engine.encode_chat(messages)
    assert cuts == []
    assert engine.encode_chat([{"role": "user", "content": "def add"}]).text == "user: def add\nassistant:"
    assert len(cuts) == 2, "once for each model"


def test_a_prompt_of_the_longest_tokens_that_fits_is_served(server: ServerRun, cuts: list[str]):
    engine, text = server.engine, longest_of_all(server)
    cuts.clear()
    prompt = engine.encode(text)
    assert cuts == [text, text], "once for each model"
    assert len(text) > 10 * len(prompt.tokens)
    assert list(prompt.pieces) == server.models.clip_prompt(server.models.drafter_vocabulary.encode(text))
    assert len(prompt.pieces) <= server.models.drafter.max_length // 2, "the drafter reads the end"
    listener = submit_prompt(engine, text, max_tokens=1)
    assert listener.end().usage.emitted == 1


def test_a_prompt_of_tokens_is_the_text_of_these_tokens(engine: LiveEngine):
    whole = engine.encode("def add(one, two):")
    assert engine.encode(whole.tokens) == whole
    with pytest.raises(UnfitPromptError, match=r"must be from 0 to [0-9]+"):
        engine.encode((10**6,))
