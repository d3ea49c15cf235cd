"""A run whose drafter learns in closed form: the text is the target's, and versions are drafters of their own."""

from pathlib import Path

import pytest
from replaying import config_of, run_replay, table_of
from safetensors.torch import load_file
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from stages.drafting.target_states import FEATURES, STATES_FILE
from stages.models.huggingface import load_causal_model

LEARNING = {"learn__method": "least-squares", "sampling__temperature": 0.0, "draft__sources": ("model",)}


def completions(run: Path) -> list[str]:
    return [row["completion_text"] for row in table_of(run, "prompts").sort_by("offset").to_pylist()]


@pytest.mark.slow
def test_the_text_is_that_without_learning_and_the_drafter_gains(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run_replay(config_of(tiny_pair, **LEARNING, learn__enabled=False), tmp_path / "plain")
    run_replay(config_of(tiny_pair, **LEARNING), tmp_path / "learning")
    assert completions(tmp_path / "learning") == completions(tmp_path / "plain")
    updates = [row for row in table_of(tmp_path / "learning", "updates").to_pylist() if row["part"] == "drafter"]
    assert any(row["served"] for row in updates)
    last = updates[-1]
    assert last["acceptance_after"] > last["acceptance_floor"]


@pytest.mark.slow
def test_a_published_version_has_an_output_layer_of_its_own_and_drafts(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    changes = {"publish__enabled": True, "publish__mlflow_uri": f"sqlite:///{tmp_path / 'ml.db'}"}
    run_replay(config_of(tiny_pair, **LEARNING, **changes), tmp_path / "run")
    folder = max((tmp_path / "run" / "versions").iterdir())
    model = load_causal_model(str(folder), "float32", "cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    (states,) = load_file(folder / STATES_FILE).values()
    assert states.shape == (model.vocab_size, FEATURES)
    assert bool(states.any())
    again = config_of(tiny_pair, **LEARNING, learn__enabled=False, drafter=str(folder))
    run_replay(again, tmp_path / "again")
    assert completions(tmp_path / "again") == completions(tmp_path / "run")
    accepted = [
        sum(row["accepted"] for row in table_of(tmp_path / run, "blocks").to_pylist()) for run in ("run", "again")
    ]
    assert accepted[1] > accepted[0], "with the states' weights from the first prompt on"
