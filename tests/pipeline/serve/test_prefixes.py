"""Known prefixes of a server: the same text with and without them, and nobody uses those of another tenant."""

from pathlib import Path
from typing import Any

import pytest
from serving_tiny import complete_all, greedy_generate, run_server, serve_config, submit_prompt
from tiny_pair import TinyPair, sentences, tiny_pair  # noqa: F401  (a fixture)

from pipeline.serve.engine import LiveEngine

SYSTEM = " ".join(sentences(20, 22))
QUESTIONS = [f"{SYSTEM} {text[:30]}" for text in sentences(800, 804)]


def copied(engine: LiveEngine) -> int:
    return engine.read_status().prefixes.copied_prompts


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"prompts__chunk": 5}, {"prompts__cache_bytes": 0}], ids=str)
def test_greedy_text_is_that_of_plain_decoding(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
):
    with run_server(serve_config(tiny_pair, **changes), tmp_path / "run") as server:
        found = [submit_prompt(server.engine, text).tokens for text in QUESTIONS[:1]]
        found += [one.tokens for one in complete_all(server.engine, QUESTIONS[1:])]
        turn = QUESTIONS[0] + submit_prompt(server.engine, QUESTIONS[0]).text + " Then"
        assert submit_prompt(server.engine, turn).tokens == greedy_generate(tiny_pair, turn)
        status = server.engine.read_status()
    assert found == [greedy_generate(tiny_pair, text) for text in QUESTIONS]
    if changes.get("prompts__cache_bytes") == 0:
        assert (status.prefixes.copied_tokens, status.prefix_bytes) == (0, 0)
    else:
        assert status.prefixes.copied_prompts == len(QUESTIONS) + 1, "all but the first"
        assert 0 < status.prefixes.copied_tokens < status.prefixes.tokens
        assert 0 < status.prefix_bytes <= server.config.prompts.cache_bytes


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_tenants_are_apart_unless_they_share(tiny_pair: TinyPair, tmp_path: Path, shared: bool):  # noqa: F811
    with run_server(serve_config(tiny_pair, prompts__share_tenants=shared), tmp_path / "run") as server:
        hits = []
        for tenant in ("ann", "ida", "", "ida"):
            before = copied(server.engine)
            submit_prompt(server.engine, QUESTIONS[0], tenant=tenant).end()
            hits.append(copied(server.engine) - before)
    assert hits == ([0, 1, 1, 1] if shared else [0, 0, 0, 1])


def test_a_private_request_leaves_no_prefix(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    with run_server(serve_config(tiny_pair), tmp_path / "run") as server:
        submit_prompt(server.engine, QUESTIONS[0], store=False).end()
        submit_prompt(server.engine, QUESTIONS[1]).end()
        assert copied(server.engine) == 0
        submit_prompt(server.engine, QUESTIONS[2]).end()
        assert copied(server.engine) == 1


def test_the_cache_stays_in_its_budget(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    budget = 100_000
    with run_server(serve_config(tiny_pair, prompts__cache_bytes=budget), tmp_path / "run") as server:
        for text in QUESTIONS * 2:
            assert submit_prompt(server.engine, text).tokens == greedy_generate(tiny_pair, text)
            assert 0 < server.engine.read_status().prefix_bytes <= budget
