"""Settings of a server, and the encoding of conversations."""

from pathlib import Path

import pytest
from serving_tiny import load_pair, serve_config
from tiny_pair import TinyPair

from pipeline.serve.run import derive_serving_config, make_conversation
from store.errors import ConfigError


@pytest.mark.parametrize(
    ("learn", "enabled", "learns"),
    [("live", True, True), ("shadow", True, True), ("off", True, False), ("live", False, False)],
)
def test_learning_needs_both_settings(tiny_pair: TinyPair, learn: str, enabled: bool, learns: bool):
    config = serve_config(tiny_pair, serve__learn=learn, learn__enabled=enabled)
    assert derive_serving_config(config).learn.enabled is learns


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for"], ids=["missing", "no text", "no template"])
def test_an_unusable_template_is_an_error_before_serving(tiny_pair: TinyPair, tmp_path: Path, content: bytes | None):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    config = serve_config(tiny_pair, source__chat_template=path)
    with pytest.raises(ConfigError, match="template"):
        make_conversation(config.source, load_pair(tiny_pair))
