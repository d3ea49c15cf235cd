"""Parts of libraries that are imported when they are called, and not before."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from stages.engine.checkpoints.deferred_imports import defer_imports
from stages.engine.models.huggingface import new_llama

WEIGHTS = "model.safetensors"
PROGRAM = """
import sys
import torch
import pyarrow
from pipeline.learning.drift import make_detector
from stages.engine.checkpoints.deferred_imports import keep_arrow_alone
from stages.engine.models.huggingface import load_causal_model
keep_arrow_alone()
model = load_causal_model(sys.argv[1], "float32", "cpu")
optimiser = torch.optim.AdamW(model.parameters())
model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
optimiser.step()
model.save_pretrained(sys.argv[2])
make_detector("page-hinkley").update(0.5)
table = pyarrow.table({"a": pyarrow.array(["b", "c"])})
late = {"torch._dynamo.eval_frame", "scipy.optimize", "scipy.stats", "accelerate", "sklearn", "pandas", "mlflow"}
assert not late & set(sys.modules), late & set(sys.modules)

assert table.to_pandas()["a"].tolist() == ["b", "c"]
from transformers.loss import loss_for_object_detection
assert loss_for_object_detection.linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
assert "scipy.optimize" in sys.modules
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    pass
import torch._dynamo.config  # a part, of the module itself
assert torch._dynamo.config.recompile_limit > 0
passes = []
compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: passes.append(graph) or graph.forward)
assert compiled(torch.ones(2)).tolist() == [2, 2] and len(passes) == 1
assert "torch._dynamo.eval_frame" in sys.modules
"""


def test_models_and_training_load_no_compiler_until_one_is_called(tmp_path: Path):
    new_llama(0, vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "saved" / WEIGHTS).keys() == load_file(tmp_path / WEIGHTS).keys()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package `borrows` that imports a function of `lends`, which is not loaded yet."""
    (tmp_path / "lends.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "borrows.py").write_text("from lends import double\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("lends", "borrows"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("library")
def test_a_function_imports_its_module_when_it_is_called():
    with defer_imports("lends"):
        import borrows
    assert "lends" not in sys.modules
    assert borrows.double(4) == 8
    assert "lends" in sys.modules


@pytest.mark.usefixtures("library")
def test_a_loaded_module_stays_and_errors_leave_nothing():
    with pytest.raises(ZeroDivisionError), defer_imports("lends"):
        raise ZeroDivisionError
    import lends

    with defer_imports("lends"):
        import borrows
    assert borrows.double is lends.double
    assert sys.modules["lends"] is lends
