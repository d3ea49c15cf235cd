"""Other engines in the benchmark: found or refused, the same greedy tokens where they are."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import config_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline import bench_engine_llamacpp, bench_engine_openvino
from pipeline.bench_arms import Arm, Engines, Round
from pipeline.bench_engine_gguf import _paired, _tensors, _write_tokenizer, save_gguf
from pipeline.bench_engine_llamacpp import LlamaCpp, LlamaCppArm
from pipeline.bench_engine_weights import load_llama, request_of
from pipeline.bench_engines import OtherEngines, find_engines
from pipeline.build_models import Models, load_models
from pipeline.config import Config
from stages.huggingface import load_causal_model, load_tokenizer, new_llama
from store.errors import ModelError, UsageError
from store.events import PromptReceived

TEXTS = ("Ann has 3 apples", "Tom has 12", "In the end Ida has", "Carlos has 7 pencils and finds", "more", "")
NEW_TOKENS = 12
LLAMA_CPP = os.environ.get("OMNIDRAFT_LLAMA_CPP", "")
needs_openvino = pytest.mark.skipif(find_spec("openvino_genai") is None, reason="openvino-genai is not installed")
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
needs_llama_cpp = pytest.mark.skipif(
    find_spec("gguf") is None or not LLAMA_CPP, reason="OMNIDRAFT_LLAMA_CPP does not name a build, or no gguf"
)
ENGINES = [pytest.param("openvino", marks=needs_openvino), pytest.param("llama.cpp", marks=needs_llama_cpp)]

# What the arm needs of llama.cpp's server, with the end of the prompt for a completion.
ANSWERING = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(__file__ + ".asked", "a") as file:
            file.write(json.dumps(asked) + "\\n")
        drafted = {"draft_n": 5, "draft_n_accepted": 2} if "--model-draft" in sys.argv else {}
        self.answer({"tokens": asked["prompt"][-2:], "timings": drafted})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

if "--version" in sys.argv:
    print("version: 77 (abc)", file=sys.stderr)
else:
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
REFUSING = "print('loading'); print('error: draft model vocab must match'); raise SystemExit(1)"


def prompts() -> list[PromptReceived]:
    return [
        PromptReceived(offset=number, prompt_id=str(number), dataset="sums", line=number, text=text)
        for number, text in enumerate(TEXTS)
    ]


def settings(pair: TinyPair, **changes: Any) -> Config:
    return config_of(pair, **{"sampling__max_new_tokens": NEW_TOKENS, "threads": 1, "dtype": "float32", **changes})


@pytest.fixture
def models(tiny_pair: TinyPair, tmp_path: Path) -> Models:  # noqa: F811
    return load_models(settings(tiny_pair), "", tmp_path)[0]


def greedy(models: Models, source: Path) -> list[tuple[int, ...]]:
    model, completions = load_causal_model(str(source), "float32", "cpu"), []
    for text in TEXTS:
        ids = models.target_words.encode(text)
        made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)
        completions.append(tuple(made[0, len(ids) :].tolist()))
    return completions


def stand_in(folder: Path, program: str) -> Path:
    """A build folder whose server is a Python program."""
    server = folder / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
    server.chmod(0o755)
    return folder


@pytest.fixture
def without_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine_llamacpp, "save_gguf", lambda llama, path, dtype: path.touch())
    monkeypatch.setattr(bench_engine_llamacpp, "find_spec", lambda name: name)


def test_an_engine_that_is_not_installed_is_refused_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (bench_engine_openvino, bench_engine_llamacpp):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install openvino-genai"):
        find_engines(openvino=True, llama_cpp=None)
    with pytest.raises(UsageError, match=f"no llama-server is in '{tmp_path}'"):
        find_engines(openvino=False, llama_cpp=tmp_path)
    with pytest.raises(UsageError, match="pip install gguf"):
        find_engines(openvino=False, llama_cpp=stand_in(tmp_path, ANSWERING))


def test_names_and_labels_are_those_of_the_engines_asked_for():
    both: Engines = OtherEngines("2026.4", LlamaCpp(Path("llama-server"), "77 (abc)"))
    names = both.names(8, 1.0)
    assert names == ["openvino", "openvino-speculative", "llama.cpp", "llama.cpp-speculative"]
    assert [both.label(name) for name in names[1:3]] == ["OpenVINO GenAI 2026.4, speculative", "llama.cpp 77 (abc)"]
    assert list(OtherEngines(None, None).names(1, 0.0)) == []


@pytest.mark.usefixtures("without_conversion")
def test_a_server_is_found_and_asked_in_ids(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    engines = find_engines(openvino=False, llama_cpp=stand_in(tmp_path, ANSWERING))
    assert engines.label("llama.cpp-speculative") == "llama.cpp 77 (abc), speculative"
    config = settings(tiny_pair, batch=2, sampling__temperature=1.0, seed=40)
    arm = engines.build("llama.cpp-speculative", config, models, tmp_path)
    try:
        made = arm.complete(prompts())
    finally:
        arm.close()
    encoded = [models.target_words.encode(text) for text in TEXTS]
    assert made.tokens == tuple(tuple(ids[-2:]) for ids in encoded)
    assert (made.judged, made.accepted) == (5 * len(TEXTS), 2 * len(TEXTS))
    record = tmp_path / "build" / "bin" / "llama-server.asked"
    asked = sorted((json.loads(line) for line in record.read_text().splitlines()), key=lambda one: one["seed"])
    assert [one["prompt"] for one in asked] == encoded
    assert [one["seed"] for one in asked] == [40, 41, 42, 43, 44, 45]
    assert {one["n_predict"] for one in asked} == {NEW_TOKENS}
    assert asked[0]["samplers"] == ["top_k", "top_p", "temperature"]


@pytest.mark.usefixtures("without_conversion")
def test_without_a_drafter_nothing_is_judged(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    engines = find_engines(openvino=False, llama_cpp=stand_in(tmp_path, ANSWERING))
    arm = engines.build("llama.cpp", settings(tiny_pair), models, tmp_path)
    try:
        made = arm.complete(prompts()[:2])
    finally:
        arm.close()
    assert (made.judged, made.accepted) == (None, None)


@pytest.mark.usefixtures("without_conversion")
def test_a_server_that_ends_is_refused_with_its_last_words(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    found = LlamaCpp(stand_in(tmp_path, REFUSING) / "build/bin/llama-server", "")
    request = request_of(settings(tiny_pair), models, "", tmp_path)
    with pytest.raises(UsageError, match="draft model vocab must match"):
        LlamaCppArm(found, request, models.target_words, tmp_path, speculative=True)


def test_weights_are_read_with_the_shape(tiny_pair: TinyPair):  # noqa: F811
    llama = load_llama(str(tiny_pair.target))
    assert (llama.layers, llama.width, llama.heads, llama.pairs, llama.head, llama.mlp) == (2, 48, 2, 1, 24, 96)
    assert "lm_head.weight" not in llama.weights, "it is the embedding"
    names = dict(_tensors(llama))
    assert len(names) == 2 + 2 * 9
    assert names["blk.1.ffn_up.weight"].shape == (96, 48)


def test_another_kind_of_llama_is_refused(tmp_path: Path):
    biased = new_llama(
        0, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, mlp_bias=True
    )
    biased.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="leave these engines out"):
        load_llama(str(tmp_path))


def test_rows_of_heads_are_paired_for_neighbouring_rotation():
    rows = torch.arange(8)[:, None].numpy()  # two heads of four
    assert _paired(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


class Recorded(dict[str, Any]):
    """Keeps what a GGUF writer is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.__setitem__(name.removeprefix("add_"), value)


def test_tokenizers_become_those_of_llama_cpp(tiny_pair: TinyPair):  # noqa: F811
    written: dict[str, Mapping[str, Any]] = {}
    for name, folder in (("target", tiny_pair.target), ("drafter", tiny_pair.drafter)):
        llama, record = load_llama(str(folder)), Recorded()
        _write_tokenizer(record, llama.tokenizer, llama.vocabulary + 1)
        assert record["token_list"][:3] == ["<unk>", "<s>", "</s>"]
        assert record["token_types"][:3] == [2, 3, 3]
        assert record["token_types"][-1] == 5
        assert (record["bos_token_id"], record["eos_token_id"]) == (1, 2)
        written[name] = record
    assert (written["target"]["tokenizer_model"], written["target"]["tokenizer_pre"]) == ("gpt2", "gpt-2")
    assert written["target"]["token_merges"][0].count(" ") == 1
    assert written["drafter"]["tokenizer_model"] == "llama"
    scores = dict(zip(written["drafter"]["token_list"], written["drafter"]["token_scores"], strict=True))
    state = json.loads(load_tokenizer(str(tiny_pair.drafter)).backend_tokenizer.to_str())
    learned = ["".join(merge) for merge in state["model"]["merges"]]
    assert [scores[piece] for piece in learned] == [-float(learned.index(piece)) for piece in learned]
    assert scores["<s>"] == -len(learned), "below everything that was learned"
    types = dict(zip(written["drafter"]["token_list"], written["drafter"]["token_types"], strict=True))
    assert types["<0x0A>"] == 6


@needs_gguf
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_gguf_file_holds_every_weight(tiny_pair: TinyPair, tmp_path: Path, dtype: str, width: int):  # noqa: F811
    import gguf

    llama = load_llama(str(tiny_pair.target))
    save_gguf(llama, tmp_path / "model.gguf", dtype)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert found.keys() == dict(_tensors(llama)).keys()
    assert found["blk.0.ffn_down.weight"].n_bytes == 48 * 96 * width
    assert found["output_norm.weight"].n_bytes == 48 * 4


@pytest.fixture
def arm_of(tiny_pair: TinyPair, models: Models, tmp_path: Path) -> Iterator[Any]:  # noqa: F811
    made: list[Arm] = []

    def build(name: str, drafter: Path = tiny_pair.drafter, **changes: Any) -> Arm:
        folder = Path(LLAMA_CPP) if name.startswith("llama.cpp") else None
        engines = find_engines(openvino=folder is None, llama_cpp=folder)
        with_drafter = replace(models, drafter_folder=drafter)
        made.append(engines.build(name, settings(tiny_pair, **changes), with_drafter, tmp_path))
        return made[-1]

    yield build
    for arm in made:
        arm.close()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_those_of_transformers(
    name: str,
    batch: int,
    arm_of: Any,
    tiny_pair: TinyPair,  # noqa: F811
    models: Models,
):
    made: Round = arm_of(name, batch=batch).complete(prompts())
    assert list(made.tokens) == greedy(models, tiny_pair.target)
    assert made.seconds > 0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ENGINES)
def test_a_drafter_of_the_same_vocabulary_changes_no_token(
    name: str,
    batch: int,
    arm_of: Any,
    tiny_pair: TinyPair,  # noqa: F811
    models: Models,
):
    made = arm_of(f"{name}-speculative", tiny_pair.target, batch=batch).complete(prompts())
    wanted = greedy(models, tiny_pair.target)
    shortest = 0 if name == "openvino" else 5  # llama.cpp stops up to a block before the limit
    for own, theirs in zip(made.tokens, wanted, strict=True):
        assert own == theirs[: len(own)]
        assert len(own) >= len(theirs) - shortest
    assert 0 < made.accepted <= made.judged < made.emitted, "counted once, whatever the batch"
    assert made.accepted == made.judged or batch > 1  # by OpenVINO's own count fewer in a batch, of the same tokens


@pytest.mark.parametrize("name", ENGINES)
def test_sampling_keeps_to_lengths(name: str, arm_of: Any):
    made = arm_of(name, sampling__temperature=1.0, batch=4).complete(prompts())
    assert all(1 <= len(tokens) <= NEW_TOKENS for tokens in made.tokens)
    assert len(set(made.tokens)) > 1


@needs_openvino
def test_openvino_refuses_two_vocabularies(arm_of: Any):
    with pytest.raises(UsageError, match="Tokenizers for draft and main models are different"):
        arm_of("openvino-speculative")
