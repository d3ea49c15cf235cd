"""A run whose drafter learns in closed form: the text is the target's, and versions are drafters of their own."""

from pathlib import Path

import pytest
from replaying import config_of, run_replay, table_of
from safetensors.torch import load_file
from tiny_pair import TinyPair

from stages.drafting.target_states import FEATURES, STATES_FILE
from stages.engine.models.huggingface import load_causal_model

LEARNING = {"learn__method": "least-squares", "sampling__temperature": 0.0, "draft__sources": ("model",)}


def completions(run: Path) -> list[str]:
    return [row["completion_text"] for row in table_of(run, "prompts").sort_by("offset").to_pylist()]


@pytest.mark.slow
def test_a_published_version_has_an_output_layer_of_its_own_and_drafts(tiny_pair: TinyPair, tmp_path: Path):
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
