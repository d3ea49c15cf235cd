"""Learning on a thread of its own, with real models: an update serves from a fixed prompt on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from constants import constants
from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from store.events import PromptReceived, TokenDecision, Updated


def prompts() -> Iterator[PromptReceived]:
    for offset, text in enumerate(sentences(600, 609)):
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text[:30])


@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_drafted_while_an_update_is_under_way_is_drafted_by_the_weights_before(
    tiny_pair: TinyPair,
    tmp_path: Path,
    lag: int,
):
    config = config_of(tiny_pair)
    with constants(update_lag=lag):
        events = list(build_loop(config, load_models(config, "", tmp_path), tmp_path).run(prompts()))
    first = next(event for event in events if isinstance(event, Updated) and event.part == "drafter" and event.served)
    versions = {event.offset: event.drafter_version for event in events if isinstance(event, TokenDecision)}
    assert [versions[first.offset + later] for later in (1, 2)] == ([0, 1] if lag else [1, 1])
