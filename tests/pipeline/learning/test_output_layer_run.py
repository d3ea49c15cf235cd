"""A run whose drafter learns in closed form: the text is the target's, and versions are drafters of their own."""

from pathlib import Path

import pytest
import torch
from recorded_examples import record_examples
from replaying import config_of, run_replay, table_of
from safetensors.torch import load_file
from tiny_pair import TinyPair

from pipeline.assembly.models import Models, load_only_target
from pipeline.assembly.stages import draftable
from pipeline.config.settings import Config
from stages.drafting.target_states import FEATURES, STATES_FILE
from stages.engine.models.huggingface import load_causal_model
from stages.learn.examples.losses import LOSSES, greedy_agreement
from stages.learn.training.closed_form import OutputLayerTrainer
from stages.learn.training.update import TrainingConfig

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


def make_trainer(config: Config, models: Models) -> OutputLayerTrainer:
    training = TrainingConfig(1e-3, 0.0, 1, 1.0, replay=64, gate_window=4, gate_tolerance=0.01, seed=0)
    allowed = {models.name: draftable(config.draft, models.pair)}
    loss = LOSSES["trie"]
    return OutputLayerTrainer(models.drafter, "trie", loss, greedy_agreement, allowed, training)


@pytest.mark.slow
def test_a_real_targets_prompt_is_unlearned_to_the_solution_of_a_trainer_that_never_saw_it(tmp_path: Path):
    """The built-in pair, the target's own soft targets and states; the prompt is one of five of the first update.

    The strength is not part of it: the prompts after it were measured with a solution that had learned it.
    """
    given = {
        "sources": ("builtin:questions",), "targets": ("builtin:target-7m",), "drafter": "builtin:drafter-1.6m",
        "source.limit": 8, "sampling.max_new_tokens": 24, "sampling.temperature": 0.0, "draft.sources": ("model",),
        "draft.costs": "estimated", "learn.enabled": True, "learn.method": "least-squares",
        "device": "cpu",
    }  # fmt: skip
    config = Config().with_overrides(given)
    models, examples = record_examples(config)
    assert len(examples) == 8
    assert all(example.states is not None for example in examples)
    first, secret, later = examples[:5], examples[2], examples[5:]
    trainers = [make_trainer(config, one) for one in (models, load_only_target(config, tmp_path))]
    for trainer, seen in zip(trainers, (first, [one for one in first if one is not secret]), strict=True):
        for fresh in (seen, *([example] for example in later)):
            trainer.settle(trainer.attempt(trainer.assign(fresh)))
    solutions = [trainer._sums.solve() for trainer in trainers]
    assert float((solutions[0] - solutions[1]).abs().max()) > 1e-4
    forgetful, ignorant = trainers
    forgetful.forget(lambda example: example is secret)
    torch.testing.assert_close(forgetful._sums.solve(), ignorant._sums.solve(), atol=1e-6, rtol=0)
    ignorant._measured = list(forgetful._measured)
    with torch.no_grad():
        ignorant._serve_solution()  # whatever the gate decided about its last update
    assert forgetful._strength > 0
    pairs = zip(forgetful.served.trained_weights, ignorant.served.trained_weights, strict=True)
    assert max(float((left - right).detach().abs().max()) for left, right in pairs) < 1e-6
