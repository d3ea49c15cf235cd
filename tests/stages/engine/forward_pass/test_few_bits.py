"""Models of few bits: the codes of a GGUF file, and weights that are quantised when they are loaded. Most tests are of
the packed forward; `tests/stages/engine/compiled` has the compiled one.
"""

from collections import defaultdict
from pathlib import Path

import gguf_making
import pytest
import torch
from doubles import row_of
from tiny_pair import TinyPair, sentences, tiny_pair  # noqa: F401  (a fixture)
from torch import nn

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, new_llama
from stages.engine.models.language_model import LanguageModel, fingerprint, load_model
from stages.engine.quantisation.modules import find_groups
from store.errors import ConfigError, ModelError
from store.events import PromptReceived, TokenDecision

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
NEW_TOKENS, PROMPTS = 24, 12
NEAR = 0.05  # standard deviations of the logits between two tokens; a near tie


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "few-bits"))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward pass is compiled."""
    for name in ("has_compiled_forward", "prefers_compiled_forward"):
        monkeypatch.setattr(f"stages.engine.models.forward_choice.{name}", lambda *_, **__: False)


@pytest.fixture(scope="module")
def pair(tiny_pair: TinyPair) -> TinyPair:  # noqa: F811
    """Gives the tokenizer of the target, and the drafter."""
    return tiny_pair


@pytest.fixture(scope="module")
def folder(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights whose matrices fit groups of 32."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = load_tokenizer(str(pair.target))
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = new_llama(3, vocab_size=len(tokenizer), initializer_range=0.2, **SHAPE, **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(folder: Path, path: Path, kind: str) -> Path:
    """Write a folder's model as a GGUF file with matrices of one type."""
    llama = gguf_making.load_llama(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_making.TYPES, kind, kind)
        gguf_making.save_gguf(llama, path, kind, [llama.tokenizer.eos_token_id])
    return path


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, Path]:
    """Files of three types, by type."""
    return {kind: write(folder, folder / f"{kind}.gguf", kind) for kind in ("Q4_0", "Q4_1", "Q8_0")}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_matrix_has_the_codes_of_its_weight(files: dict[str, Path], kind: str):
    """Rows of queries and keys are in another order in the file."""
    model = load_causal_model(str(files[kind]), "float32", "cpu", codes=True)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 3 * 7 + 1
    for linear in linears:
        groups = find_groups(linear, quantise=False)
        assert groups is not None
        assert torch.equal(groups.dequantise(), linear.weight)
    plain = load_causal_model(str(files[kind]), "float32", "cpu")
    assert all(
        find_groups(module, quantise=False) is None for module in plain.modules() if isinstance(module, nn.Linear)
    )
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_file_runs_in_its_own_bits_by_default(files: dict[str, Path], folder: Path):
    assert {load_model(str(path), "float32", "cpu", "auto").weights for path in files.values()} == {"codes"}
    assert load_model(str(folder), "float32", "cpu", "auto").weights == "fastest"
    assert load_model(str(files["Q4_1"]), "float32", "cpu", "fastest").weights == "fastest"


@pytest.mark.usefixtures("packed")
def test_own_bits_need_the_compiled_forward(files: dict[str, Path]):
    assert load_model(str(files["Q4_0"]), "float32", "cpu", "auto").weights == "fastest"
    for weights in ("codes", "codes8", "int4"):
        with pytest.raises(ModelError, match=f"weights in {weights} need the compiled forward pass"):
            load_model(str(files["Q4_0"]), "float32", "cpu", weights).prove_forward()


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("weights", ["fastest", "float32", "bfloat16", "int8"])
def test_every_format_is_proved_and_is_another_model_where_it_rounds(files: dict[str, Path], weights: str):
    model, plain = (load_model(str(files["Q4_1"]), "float32", "cpu", kind) for kind in (weights, "fastest"))
    model.prove_forward()
    assert isinstance(model.forward_pass, PackedLlamaForward)
    assert (fingerprint(model) == fingerprint(plain)) == (weights in ("fastest", "float32"))
    text = list(range(5, 45))
    deviation = compare(read(model, text), read(plain, text))
    assert deviation < {"fastest": 1e-6, "float32": 1e-6, "int8": 0.1}.get(weights, 0.03)
    assert (deviation > 0) == (weights not in ("fastest", "float32"))


def read(model: LanguageModel, text: list[int], step: int = 1) -> torch.Tensor:
    """The logits of a text that is read in steps."""
    row = row_of(text[:1], remaining_tokens=len(text))
    model.admit(row, row.tokens)
    parts = [text[begin : begin + step] for begin in range(0, len(text), step)]
    logits_TV = torch.cat([model.forward([row], [part], [len(part)])[0] for part in parts])
    model.release(row)
    return logits_TV


def compare(one_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    """The root of the mean square of the differences, in standard deviations."""
    return float((one_TV - other_TV).square().mean().sqrt() / other_TV.std())


def test_a_checkpoint_is_quantised_when_it_is_loaded(folder: Path):
    """It computes what its modules compute with the quantised weights, and its own weights stay."""
    model, plain = (load_model(str(folder), "float32", "cpu", kind) for kind in ("int4", "fastest"))
    model.prove_forward()
    assert all(
        torch.equal(one, two) for one, two in zip(model.model.parameters(), plain.model.parameters(), strict=True)
    )
    text = list(range(5, 45))
    assert compare(read(model, text), read(plain, text)) > 0.05, "four bits are few for random weights"
    quantised = load_causal_model(str(folder), "float32", "cpu")
    for linear in quantised.model.modules():  # the output layer is not quantised
        if isinstance(linear, nn.Linear):
            groups = find_groups(linear, quantise=True)
            assert groups is not None
            linear.weight.data = groups.dequantise()
    with torch.no_grad():
        expected_TV = quantised(torch.tensor([text])).logits[0]
    assert compare(read(model, text), expected_TV) < 0.02


def test_weights_that_training_changed_are_quantised_again(files: dict[str, Path]):
    model = load_model(str(files["Q4_1"]), "float32", "cpu", "int4")
    text = list(range(5, 25))
    before_TV = read(model, text)
    changed = [weight + 0.05 * torch.randn_like(weight) for weight in model.trained_weights]
    model.load_weights(changed)
    after_TV = read(model, text)
    plain = load_model(str(files["Q4_1"]), "float32", "cpu", "fastest")
    plain.load_weights(changed)
    assert compare(after_TV, read(plain, text)) < 0.5 * compare(before_TV, read(plain, text))


@pytest.mark.slow
@pytest.mark.usefixtures("packed")
def test_with_batch_invariant_a_token_has_the_same_bits_whatever_is_computed_with_it(files: dict[str, Path]):
    texts = [[(5 + 31 * place + 7 * row) % 300 for place in range(24 + 9 * row)] for row in range(3)]

    def make() -> LanguageModel:
        return load_model(str(files["Q4_1"]), "float32", "cpu", "int8", batch_invariant=True)

    alone = [read(make(), text) for text in texts]
    for step in (2, 3, 5, 11):
        assert all(torch.equal(read(make(), text, step), own) for text, own in zip(texts, alone, strict=True))
    model, rows = make(), [row_of(text[:1], remaining_tokens=64) for text in texts]
    for row in rows:
        model.admit(row, row.tokens)
    for place in range(0, 24, 4):
        found = model.forward(rows, [text[place : place + 4] for text in texts], [4] * 3)[0].split(4)
        assert all(torch.equal(one, own[place : place + 4]) for one, own in zip(found, alone, strict=True))
    model.prove_forward()
    assert not model.reads_trees
    assert "one kernel" in model.forward_pass.name


def settings(pair: TinyPair, target: Path, **changes: object) -> Config:
    """A run that drafts in every block, from all sources."""
    fixed: dict[str, object] = {
        "targets": (str(target),),
        "drafter": str(pair.drafter),
        "device": "cpu",
        "threads": 1,
        "publish.enabled": False,
        "learn.enabled": False,
        "sampling.max_new_tokens": NEW_TOKENS,
        "source.chat": False,
        "draft.pause": False,
        "draft.costs": "estimated",
    }
    return Config().with_overrides(fixed | changes)


def generate(config: Config, folder: Path) -> tuple[Models, dict[int, list[int]], int]:
    """The models of a run, each prompt with its completion, and the number of drafted tokens that were accepted.

    Each prompt comes twice: the second time, the memory drafts what was emitted the first time.
    """
    (models,) = load_models(config, "", folder)
    texts = [sentence[: 20 + 3 * number] for number, sentence in enumerate(sentences(500, 500 + PROMPTS // 2))] * 2
    prompts = [PromptReceived(number, "sums", "here", number + 1, text) for number, text in enumerate(texts)]
    found: dict[int, list[int]] = defaultdict(list)
    accepted = 0
    for event in build_loop(config, (models,), folder).run(iter(prompts)):
        if isinstance(event, TokenDecision) and event.emitted_id is not None:
            found[event.offset].append(event.emitted_id)
            accepted += event.emitted_id == event.proposed_id
    encoded = {number: models.target_vocabulary.encode(text) for number, text in enumerate(texts)}
    return models, {number: [*encoded[number], -1, *found[number]] for number in encoded}, accepted


def decode_plainly(
    model: LanguageModel, tokens: list[int], ends: frozenset[int]
) -> tuple[list[int], list[torch.Tensor]]:
    """Decode one token after another; the tokens and the logits that each was taken from."""
    row, found, logits = row_of(tokens, remaining_tokens=NEW_TOKENS + 1), [], []
    model.admit(row, row.tokens)
    last = tokens[-1]
    while len(found) < NEW_TOKENS and (not found or last not in ends):
        logits_NV, _ = model.forward([row], [[last]], [1])
        last = int(logits_NV[0].argmax())
        found.append(last)
        logits.append(logits_NV[0])
    model.release(row)
    return found, logits


@pytest.mark.slow
@pytest.mark.usefixtures("packed")
@pytest.mark.representatives(2)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_greedy_text_is_that_of_plain_decoding(
    files: dict[str, Path], pair: TinyPair, tmp_path: Path, batch_invariant: bool, batch: int
):
    """With one kernel, every token is equal; otherwise those up to the first near tie."""
    config = settings(pair, files["Q4_1"], weights="int8", batch=batch, batch_invariant=batch_invariant)
    models, found, accepted = generate(config, tmp_path)
    plain = load_model(str(files["Q4_1"]), "float32", "cpu", "int8", batch_invariant=batch_invariant)
    plain.restrict(set(range(len(models.target_vocabulary.token_bytes))))
    assert plain.weights == models.target.weights == "int8"
    assert accepted > PROMPTS, "drafts were accepted"
    differing = 0
    for line in found.values():
        prompt, emitted = line[: line.index(-1)], line[line.index(-1) + 1 :]
        expected, logits = decode_plainly(plain, prompt, models.eos_ids)
        if emitted != expected:
            differing += 1
            place = next(index for index, pair in enumerate(zip(emitted, expected, strict=False)) if len(set(pair)) > 1)
            gap = logits[place][expected[place]] - logits[place][emitted[place]]
            assert float(gap / logits[place].std()) < NEAR
    assert differing <= (0 if batch_invariant else PROMPTS // 3)


def test_rounded_weights_need_the_packed_forward(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LanguageModel, "_can_pack", lambda _: False)
    for weights in ("int4", "bfloat16"):
        with pytest.raises(ModelError, match=f"weights in {weights} need the packed forward"):
            load_model(str(files["Q4_1"]), "float32", "cpu", weights).prove_forward()
    with pytest.raises(ModelError, match="batch_invariant needs the packed forward"):
        load_model(str(files["Q4_1"]), "float32", "cpu", "fastest", batch_invariant=True).prove_forward()


def test_another_device_has_no_kernels_for_few_bits(pair: TinyPair, files: dict[str, Path], tmp_path: Path):
    for key in ("weights", "draft.weights"):
        with pytest.raises(ConfigError, match="weights in int4 are for the CPU alone, but the device is meta"):
            load_models(settings(pair, files["Q4_1"], device="meta", **{key: "int4"}), "", tmp_path)
