"""Settings of a server, and the encoding of conversations."""

from pathlib import Path

import pytest
from serving_tiny import load_pair, serve_config
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.serve.run import derive_serving_config, make_conversation
from store.errors import ConfigError, UsageError

MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Ann has 3"}]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}answer:"


def test_one_target_is_served(tiny_pair: TinyPair):  # noqa: F811
    config = serve_config(tiny_pair)
    two = config.with_overrides({"targets": ("one", "two")})
    with pytest.raises(UsageError, match="one target, got one, two"):
        derive_serving_config(two)
    with pytest.raises(UsageError, match="one target"):
        derive_serving_config(config.with_overrides({"swaps": ("4=other",)}))


@pytest.mark.parametrize(
    ("learn", "enabled", "learns"),
    [("live", True, True), ("shadow", True, True), ("off", True, False), ("live", False, False)],
)
def test_learning_needs_both_settings(
    tiny_pair: TinyPair,  # noqa: F811
    learn: str,
    enabled: bool,
    learns: bool,
):
    config = serve_config(tiny_pair, serve__learn=learn, learn__enabled=enabled)
    assert derive_serving_config(config).learn.enabled is learns


def test_without_a_template_the_contents_are_completed_with_a_warning(
    tiny_pair: TinyPair,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
):
    models = load_pair(tiny_pair)
    conversation = make_conversation(serve_config(tiny_pair).source, models)
    tokens, _ = conversation.encode_conversation(MESSAGES)
    assert models.target_vocabulary.decode(tokens) == "Add.\n\nAnn has 3"
    assert "no chat template" in caplog.messages[0]


def test_a_configured_template_is_used(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    models = load_pair(tiny_pair)
    config = serve_config(tiny_pair, source__chat_template=tmp_path / "chat.jinja")
    tokens, pieces = make_conversation(config.source, models).encode_conversation(MESSAGES)
    expected = "system: Add.\nuser: Ann has 3\nanswer:"
    assert models.target_vocabulary.decode(tokens) == expected
    assert models.drafter_vocabulary.decode(pieces).lstrip() == expected
    assert caplog.records == []


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for"], ids=["missing", "no text", "no template"])
def test_an_unusable_template_is_an_error_before_serving(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    content: bytes | None,
):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    config = serve_config(tiny_pair, source__chat_template=path)
    with pytest.raises(ConfigError, match="template"):
        make_conversation(config.source, load_pair(tiny_pair))
