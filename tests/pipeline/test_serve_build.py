"""How a server's settings become an engine, and conversations prompts."""

from pathlib import Path

import pytest
from serving_tiny import models_of, serve_config
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.serve_build import make_conversation, serving_config
from store.errors import ConfigError, UsageError

MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Ann has 3"}]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}answer:"


def test_one_target_is_served(tiny_pair: TinyPair):  # noqa: F811
    config = serve_config(tiny_pair)
    two = config.with_overrides({"targets": ("one", "two")})
    with pytest.raises(UsageError, match="one target, got one, two"):
        serving_config(two)
    with pytest.raises(UsageError, match="one target"):
        serving_config(config.with_overrides({"swaps": ("4=other",)}))


@pytest.mark.parametrize(
    ("learn", "enabled", "learns"),
    [("live", True, True), ("shadow", True, True), ("off", True, False), ("live", False, False)],
)
def test_nothing_learns_unless_both_settings_say_so(
    tiny_pair: TinyPair,  # noqa: F811
    learn: str,
    enabled: bool,
    learns: bool,
):
    config = serve_config(tiny_pair, serve__learn=learn, learn__enabled=enabled)
    assert serving_config(config).learn.enabled is learns


def test_without_a_template_the_contents_are_completed_and_that_is_said(tiny_pair: TinyPair):  # noqa: F811
    models, notes = models_of(tiny_pair), []
    conversation = make_conversation(serve_config(tiny_pair), models, notes.append)
    tokens, _ = conversation.encode_conversation(MESSAGES)
    assert models.target_words.decode(tokens) == "Add.\n\nAnn has 3"
    assert "no chat template" in notes[0]


def test_a_template_that_is_given_is_used(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    models, notes = models_of(tiny_pair), []
    config = serve_config(tiny_pair, source__chat_template=tmp_path / "chat.jinja")
    tokens, pieces = make_conversation(config, models, notes.append).encode_conversation(MESSAGES)
    expected = "system: Add.\nuser: Ann has 3\nanswer:"
    assert models.target_words.decode(tokens) == expected
    assert models.drafter_words.decode(pieces).lstrip() == expected
    assert notes == []


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for"], ids=["missing", "no text", "no template"])
def test_a_template_that_cannot_be_used_is_said_before_anything_is_served(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    content: bytes | None,
):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    config = serve_config(tiny_pair, source__chat_template=path)
    with pytest.raises(ConfigError, match="template"):
        make_conversation(config, models_of(tiny_pair), lambda told: None)
