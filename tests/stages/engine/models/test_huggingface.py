"""`LanguageModel`: rows of unequal length, rolled back and released, read as if each were alone."""

import json
import random
import re

import pytest
import torch
from doubles import row_of

from stages.contract.blocks import SequenceState
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.models.devices import pick_device
from stages.engine.models.huggingface import load_tokenizer, new_llama
from stages.engine.models.language_model import LanguageModel, load_model
from store.errors import ModelError

VOCABULARY = 11
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def llama():
    model = new_llama(0, **SHAPE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # so that every token of the context matters
    return model


@pytest.fixture(params=["modules", "packed"])
def model(llama, request) -> LanguageModel:
    made = LanguageModel(llama, "tiny")
    if request.param == "modules":
        made.forward_pass = ModuleForward(llama)
    return made


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_no_number_is_named_even_in_a_copy_of_a_known_model(tmp_path, number: float, name: str):
    """A digest of samples of the weights would be that of the undamaged model, whose forward pass is proved."""
    model = new_llama(0, **SHAPE)
    model.save_pretrained(tmp_path)
    load_model(str(tmp_path), "float32", "cpu").prove_forward()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = number
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"but {re.escape(name)} holds NaN or infinity"):
        load_model(str(tmp_path), "float32", "cpu")


class Reader:
    """Drives a model and knows what each row has read."""

    def __init__(self, model: LanguageModel, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.rows: list[SequenceState] = []
        self.read: dict[SequenceState, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def admit(self, length: int) -> None:
        row = row_of(self.tokens(length), remaining_tokens=4)
        self.model.admit(row, row.tokens)
        self.rows.append(row)
        self.read[row] = row.tokens[:-1]

    def forward(self, counts: list[int]) -> None:
        fed = [self.tokens(count) for count in counts]
        wanted = [self.random.randint(0, len(new)) for new in fed]
        logits_NV, hidden_NW = self.model.forward(self.rows, fed, wanted, hidden=True)
        if sum(wanted):
            assert logits_NV.shape == (sum(wanted), VOCABULARY)
        for row, new, number in zip(self.rows, fed, wanted, strict=True):
            self.read[row] += new
            if number:
                (own_QV, logits_NV), (own_QW, hidden_NW) = split(logits_NV, number), split(hidden_NW, number)
                want_TV, want_TW = alone(self.model, self.read[row])
                torch.testing.assert_close(own_QV, want_TV[-number:], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(own_QW, want_TW[-number:], atol=1e-4, rtol=1e-4)

    def roll_back(self, row: SequenceState) -> None:
        length = self.random.randint(0, len(self.read[row]) + 1)
        self.model.roll_back(row, length)
        del self.read[row][length:]

    def release(self, row: SequenceState) -> None:
        self.model.release(row)
        last = self.rows.pop()
        if last is not row:
            self.rows[self.rows.index(row)] = last

    def check_lengths(self) -> None:
        assert [self.model.length(row) for row in self.rows] == [len(self.read[row]) for row in self.rows]


def split(values: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return values[:number], values[number:]


@torch.no_grad()
def alone(model: LanguageModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden states of one pass over everything, without any cache."""
    output = model.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_reading_rolling_back_and_releasing_is_like_reading_alone(model: LanguageModel, seed: int):
    reader = Reader(model, seed)
    for _ in range(25):
        act = reader.random.random()
        if not reader.rows or (act < 0.3 and len(reader.rows) < 5):
            reader.admit(reader.random.randint(1, 9))
        elif act < 0.4:
            reader.release(reader.random.choice(reader.rows))
        elif act < 0.6:
            reader.roll_back(reader.random.choice(reader.rows))
        else:
            counts = [reader.random.randint(0, 4) for _ in reader.rows]
            reader.forward([count + (not any(counts)) for count in counts])
        reader.check_lengths()


def test_rows_may_grow_beyond_what_was_reserved(model: LanguageModel):
    reader = Reader(model, 3)
    for length in (3, 5):
        reader.admit(length)
    for _ in range(3):
        reader.forward([70, 1])
    reader.admit(2)
    reader.forward([1, 2, 1])


@pytest.mark.parametrize(("length", "read"), [(1, 2), (4, 90)])
def test_rows_can_be_released_after_any_first_pass(model: LanguageModel, length: int, read: int):
    """Of a prompt of one token nothing is read at admission: the keys and values are made by the first pass."""
    reader = Reader(model, 4)
    for _ in range(3):
        reader.admit(length)
    reader.forward([1, read, 1])
    reader.release(reader.rows[0])
    reader.forward([2, 1])


def test_logits_are_the_same_whether_hidden_states_are_wanted_or_not(model: LanguageModel):
    found = []
    for hidden in (True, False):
        reader = Reader(model, 6)
        reader.admit(4)
        found.append(model.forward(reader.rows, [[1, 2, 3]], [2], hidden=hidden)[0])
        reader.release(reader.rows[0])
    assert torch.equal(*found)


def test_logits_may_be_computed_for_some_ids_alone_and_follow_the_weights(llama):
    ids, before = range(0, VOCABULARY, 3), [weight.detach().clone() for weight in llama.parameters()]
    model = LanguageModel(llama, "tiny")
    model.restrict(ids)
    assert isinstance(model.forward_pass, PackedLlamaForward)
    try:
        for factor in (1.0, 1.1):
            model.load_weights([factor * weight for weight in before])
            reader = Reader(model, 7)
            reader.admit(4)
            logits_NV = model.forward(reader.rows, [[1, 2]], [2])[0]
            want_TV = alone(model, [*reader.read[reader.rows[0]], 1, 2])[0]
            torch.testing.assert_close(logits_NV[:, ids], want_TV[-2:, ids], atol=1e-4, rtol=1e-4)
            assert (logits_NV[:, 1] == -torch.inf).all()
            reader.release(reader.rows[0])
    finally:
        model.load_weights(before)
    whole = LanguageModel(llama, "tiny")
    whole.restrict(range(VOCABULARY - 1))
    whole.admit(row := row_of([1, 2, 3]), row.tokens)
    assert torch.isfinite(whole.forward([row], [[3]], [1])[0]).all(), "leaving out one of many is not worth it"


def test_rows_out_of_order_are_refused(model: LanguageModel):
    reader = Reader(model, 0)
    for length in (2, 3):
        reader.admit(length)
    with pytest.raises(ValueError, match="in the order of admission"):
        model.forward(reader.rows[::-1], [[1], [1]], [1, 1])
    with pytest.raises(ValueError, match="all admitted rows"):
        model.forward(reader.rows[:1], [[1]], [1])


def test_a_mask_leaves_only_what_is_allowed(model: LanguageModel):
    assert (~model.mask_without({3, 5})).nonzero().flatten().tolist() == [3, 5]
    assert model.mask_without(()).all()


def test_a_model_names_its_ends(llama):
    model = LanguageModel(llama, "tiny")
    before = llama.generation_config.eos_token_id
    try:
        for setting, ends in ((None, set()), (2, {2}), ([2, 7], {2, 7})):
            llama.generation_config.eos_token_id = setting
            assert model.eos_ids == ends
    finally:
        llama.generation_config.eos_token_id = before


def test_the_error_for_what_cannot_be_loaded_names_the_places_that_were_tried(tmp_path):
    for load in (lambda: load_model(str(tmp_path), "float32", "cpu"), lambda: load_tokenizer(str(tmp_path))):
        with pytest.raises(ModelError, match=r"must load from .*the folder did not give one .*builtin:NAME"):
            load()


def test_weights_in_a_pickle_are_refused(llama, tmp_path):
    """Unpickling may run code."""
    llama.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must load as a model of the type 'llama'"):
        load_model(str(tmp_path), "float32", "cpu")


def test_a_configuration_of_absurd_sizes_is_refused(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"num_hidden_layers": 1_000_000}), encoding="utf-8")
    with pytest.raises(ModelError, match="num_hidden_layers = 1,000,000"):
        load_model(str(tmp_path), "float32", "cpu")


def test_a_saved_model_loads_again(model: LanguageModel, tmp_path):
    model.model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "float32", "cpu")
    loaded.prove_forward()
    assert (loaded.vocabulary_size, loaded.hidden_size, loaded.layers) == (VOCABULARY, 16, 2)
    assert torch.equal(alone(loaded, [1, 2, 3])[0], alone(model, [1, 2, 3])[0])


@pytest.mark.parametrize("name", ["banana", "cuda:77"])
def test_a_device_that_is_not_there_is_refused(name: str):
    with pytest.raises(ModelError, match=name):
        pick_device(name)


def test_a_device_that_is_named_is_taken():
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
