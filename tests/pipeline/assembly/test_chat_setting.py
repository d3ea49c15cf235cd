"""`source.chat`: the prompts that are put into the target's chat template, and the notes about it."""

import logging
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replaying import config_of, run_replay, table_of
from tiny_pair import TinyPair

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config, load
from pipeline.sources.conversations import to_text
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError
from store.events import PromptReceived

TEMPLATE = "{% for message in messages %}user: {{ message['content'] }}\n{% endfor %}answer:"
PLAIN, CHAT = "Ann has", "user: Ann has\nanswer:"
QUESTIONS, DOCS = "questions.jsonl", "builtin:docs"


@pytest.fixture(scope="module")
def models(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target without a chat template. No test changes it."""
    (found,) = load_models(config_of(tiny_pair), "", tmp_path_factory.mktemp("models"))
    return found


def with_template(models: Models, template: str = TEMPLATE) -> Models:
    tokenizer = deepcopy(models.target_vocabulary.tokenizer)
    tokenizer.chat_template = template
    return replace(models, target_vocabulary=Vocabulary(tokenizer, "tiny"))


def prompt_of(dataset: str, text: str = PLAIN) -> PromptReceived:
    return PromptReceived(0, "p", dataset, 1, text)


def config_with(*sources: str, **source: Any) -> Config:
    return Config.from_mapping({"sources": sources, "source": source, "device": "cpu"})


def read(config: Config, models: Models, dataset: str, text: str = PLAIN) -> str:
    """The text that the target reads, without its begin token."""
    tokens, pieces = Admission(config, models).encode(prompt_of(dataset, text))
    vocabulary = models.target_vocabulary
    begin = vocabulary.encode("")
    tokens = tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens
    assert models.drafter_vocabulary.decode(pieces).strip() == vocabulary.decode(tokens).strip()
    return vocabulary.decode(tokens)


@pytest.mark.parametrize(
    ("sources", "chat", "dataset", "expected"),
    [
        ((QUESTIONS,), "auto", "questions", CHAT),
        ((QUESTIONS,), True, "questions", CHAT),
        ((QUESTIONS,), False, "questions", PLAIN),
        ((DOCS,), "auto", "docs", PLAIN),
        ((DOCS,), True, "docs", CHAT),
        (("builtin:questions",), "auto", "questions", CHAT),
        ((DOCS, QUESTIONS), "auto", "docs", PLAIN),
        ((DOCS, QUESTIONS), "auto", "questions", CHAT),
        ((QUESTIONS, "hf://a/docs:test"), "auto", "docs", CHAT),
    ],
)
def test_prompts_are_chat_prompts_but_for_texts_to_continue(
    models: Models, sources: tuple[str, ...], chat: Any, dataset: str, expected: str
):
    assert read(config_with(*sources, chat=chat), with_template(models), dataset) == expected


@pytest.mark.parametrize(
    ("chat", "expected"),
    [("auto", "user: Ann\nuser: has\nanswer:"), (True, "user: Ann\nuser: has\nanswer:"), (False, "Ann\n\nhas")],
)
def test_a_conversation_is_put_into_the_template_as_a_whole(models: Models, chat: Any, expected: str):
    text = to_text([{"role": "user", "content": "Ann"}, {"role": "user", "content": "has"}])
    assert read(config_with(QUESTIONS, chat=chat), with_template(models), "questions", text) == expected


@pytest.mark.parametrize(
    ("sources", "chat", "line"),
    [
        ((QUESTIONS,), "auto", "prompts are put into the chat template of tiny; --no-chat completes them as text"),
        ((QUESTIONS,), True, "prompts are put into the chat template of tiny"),
        ((DOCS,), "auto", "built-in prompts are completed as text; --chat puts them into the chat template of tiny"),
        (
            (DOCS, QUESTIONS),
            "auto",
            "the other prompts are put into the chat template of tiny; builtin:docs is completed as text",
        ),
    ],
)
def test_the_line_of_the_start_says_what_is_done(models: Models, sources: tuple[str, ...], chat: Any, line: str):
    admission = Admission(config_with(*sources, chat=chat), replace(with_template(models), name="tiny"))
    assert admission.describe() == f"chat: {line}"


def test_a_target_without_a_template_completes_text(models: Models, tmp_path: Path):
    assert read(config_with(QUESTIONS), models, "questions") == PLAIN
    assert Admission(config_with(QUESTIONS), models).describe() is None
    with pytest.raises(ConfigError, match=r"must have a chat template, but has none.*source\.chat_template=FILE"):
        Admission(config_with(QUESTIONS, chat=True), models)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert read(config_with(QUESTIONS, chat_template=tmp_path / "chat.jinja"), models, "questions") == CHAT


def test_a_run_reports_it_in_its_first_line_and_keeps_the_setting(
    tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    target = shutil.copytree(tiny_pair.target, tmp_path / "target")
    tokenizer = load_tokenizer(str(target))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    completed = {}
    for chat in ("auto", False):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="omnidraft"):
            config = config_of(tiny_pair, targets=(str(target),), source__chat=chat, source__limit=2)
            run_replay(config, tmp_path / str(chat))
        assert caplog.messages[0].startswith("chat: prompts are put into") is (chat == "auto")
        assert load(tmp_path / str(chat) / "config.json").source.chat == chat
        completed[chat] = table_of(tmp_path / str(chat), "prompts")
    lengths = {chat: table.column("prompt_tokens").to_pylist() for chat, table in completed.items()}
    assert all(chat > plain for chat, plain in zip(lengths["auto"], lengths[False], strict=True))
    texts = {tuple(table.column("prompt_text").to_pylist()) for table in completed.values()}
    assert len(texts) == 1, "the log has the prompt as it was given"
