"""Other engines in the benchmark: each is found or refused, and emits the same greedy tokens."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replaying import config_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.assembly.models import Models, load_models
from pipeline.bench.engines import llamacpp as bench_engine_llamacpp
from pipeline.bench.engines import openvino as bench_engine_openvino
from pipeline.bench.engines.engines import OtherEngines, find_engines
from pipeline.bench.engines.llamacpp import LlamaCpp, LlamaCppArm, find_llama_cpp
from pipeline.bench.engines.openvino import OpenVINOArm
from pipeline.bench.engines.weights import Mode, request_of
from pipeline.bench.speed.arms import Arm, Engines
from pipeline.bench.speed.text_arms import PromptWords
from pipeline.config.settings import Config
from stages.engine.models.huggingface import load_causal_model
from store.errors import UsageError
from store.events import PromptReceived

if TYPE_CHECKING:
    from pipeline.run.rounds import Round

TEXTS = ("Ann has 3 apples", "Tom has 12", "In the end Ida has", "Carlos has 7 pencils and finds", "more", "")
NEW_TOKENS = 12
LLAMA_CPP = os.environ.get("OMNIDRAFT_LLAMA_CPP", "")
needs_openvino = pytest.mark.skipif(find_spec("openvino_genai") is None, reason="openvino-genai is not installed")
needs_llama_cpp = pytest.mark.skipif(
    find_spec("gguf") is None or not LLAMA_CPP, reason="OMNIDRAFT_LLAMA_CPP does not name a build, or no gguf"
)
ENGINES = [pytest.param("openvino", marks=needs_openvino), pytest.param("llama.cpp", marks=needs_llama_cpp)]

# The parts of llama.cpp's server that the arm uses; a completion is the end of its prompt.
ANSWERING = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

changed, seeds = threading.Condition(), []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(__file__ + ".requests", "a") as file:
            file.write(json.dumps(request) + "\\n")
        with changed:
            seeds.append(request["seed"])
            changed.notify_all()
            # The first request is slow: it is answered after two others have arrived.
            last = request["seed"] == 0 and not changed.wait_for(lambda: len(seeds) > 2, timeout=20)
        self.answer({"tokens": request["prompt"][-2:]}, 503 if last else 200)

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

if "--version" in sys.argv:
    print("version: 77 (abc)", file=sys.stderr)
elif "--help" in sys.argv:
    print("--spec-type [none|ngram-cache|ngram-simple]  --spec-ngram-size-n N  --spec-ngram-size-m M  --draft-max N")
else:
    with open(__file__ + ".arguments", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
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
        ids = models.target_vocabulary.encode(text)
        made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)
        completions.append(tuple(made[0, len(ids) :].tolist()))
    return completions


def make_fake_server(folder: Path, program: str) -> Path:
    """Write a build folder whose server is a Python program."""
    server = folder / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.write_text(f"#!{sys.executable}\n{program}", encoding="utf-8")
    server.chmod(0o755)
    return folder


@pytest.fixture
def without_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine_llamacpp, "save_gguf", lambda llama, path, dtype, ends: path.touch())
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
        find_engines(openvino=False, llama_cpp=make_fake_server(tmp_path, ANSWERING))


def test_compressed_weights_need_nncf(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_engine_openvino, "find_spec", lambda name: None if name == "nncf" else name)
    monkeypatch.setattr(bench_engine_openvino, "version", lambda name: "2026.4")
    find_engines(openvino=True, llama_cpp=None)
    with pytest.raises(UsageError, match="int4 needs NNCF in this environment: pip install nncf"):
        find_engines(openvino=True, llama_cpp=None, openvino_weights="int4")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("float32", None),
        ("int8", ("asym 8", {})),
        ("int4", ("asym 4", {"group_size": 32, "ratio": 1.0, "all_layers": True})),
    ],
)
def test_weights_are_compressed_as_the_option_requests(
    weights: str, expected: tuple[str, dict[str, Any]] | None, monkeypatch: pytest.MonkeyPatch
):
    modes = {"INT8_ASYM": "asym 8", "INT4_ASYM": "asym 4"}
    nncf = SimpleNamespace(
        CompressWeightsMode=modes, compress_weights=lambda model, mode, **options: (model, mode, options)
    )
    monkeypatch.setitem(sys.modules, "nncf", nncf)
    made = bench_engine_openvino._compress("model", weights)
    assert made == ("model" if expected is None else ("model", *expected))


def test_names_and_labels_are_those_of_the_requested_engines():
    both: Engines = OtherEngines("2026.4", LlamaCpp(Path("llama-server"), "77 (abc)"))
    names = both.names(8, 1.0)
    openvino = ["openvino", "openvino-speculative", "openvino-lookup"]
    assert names == [*openvino, "llama.cpp", "llama.cpp-speculative"]
    assert [both.label(name) for name in names[2:4]] == ["OpenVINO GenAI 2026.4, lookup", "llama.cpp 77 (abc)"]
    assert list(OtherEngines(None, None).names(1, 0.0)) == []


def test_llama_cpp_has_a_lookup_arm_where_its_help_names_it():
    words = frozenset({"--spec-type", "ngram-simple"})
    engines = OtherEngines(None, LlamaCpp(Path("llama-server"), "78", words))
    assert engines.names(1, 0.0) == ["llama.cpp", "llama.cpp-speculative", "llama.cpp-lookup"]


def test_options_of_llama_cpp_are_those_of_its_version(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    request = request_of(settings(tiny_pair, draft__max_draft=3), models, tmp_path, 60)
    old = LlamaCpp(Path("llama-server"), "old", frozenset({"--draft-max", "--cache-type-k-draft"}))
    new = LlamaCpp(
        Path("llama-server"),
        "new",
        frozenset({"--draft-max", "--spec-draft-n-max", "--spec-draft-type-k", "draft-simple", "ngram-simple"})
        | {"--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"},
    )
    drafting = bench_engine_llamacpp._draft_arguments(old, request, Path("d.gguf"))
    assert drafting == {
        "--model-draft": Path("d.gguf"),
        "--draft-max": 3,
        "--cache-type-k-draft": "f32",
        "--cache-type-v-draft": "f32",
    }
    drafting = bench_engine_llamacpp._draft_arguments(new, request, Path("d.gguf"))
    assert (drafting["--spec-type"], drafting["--spec-draft-n-max"]) == ("draft-simple", 3)
    assert "--draft-max" not in drafting
    assert bench_engine_llamacpp._lookup_arguments(new) == {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": 3,
        "--spec-ngram-simple-size-m": 10,
    }


@pytest.mark.usefixtures("without_conversion")
def test_a_server_is_found_and_receives_token_ids(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    engines = find_engines(openvino=False, llama_cpp=make_fake_server(tmp_path, ANSWERING))
    config = settings(tiny_pair, batch=2, sampling__temperature=1.0, seed=40, draft__max_draft=3)
    arm = engines.build("llama.cpp-speculative", config, models, tmp_path, 60)
    assert engines.label("llama.cpp-speculative") == "llama.cpp 77 (abc) f32, speculative, k=3"
    try:
        made = arm.complete(prompts())
    finally:
        arm.close()
    encoded = [models.target_vocabulary.encode(text) for text in TEXTS]
    assert made.tokens == tuple(tuple(ids[-2:]) for ids in encoded)
    record = tmp_path / "build" / "bin" / "llama-server.requests"
    requests = sorted((json.loads(line) for line in record.read_text().splitlines()), key=lambda one: one["seed"])
    assert [one["prompt"] for one in requests] == encoded
    assert [one["seed"] for one in requests] == [40, 41, 42, 43, 44, 45]
    assert {one["n_predict"] for one in requests} == {NEW_TOKENS}
    assert requests[0]["samplers"] == ["top_k", "top_p", "temperature"]
    assert not any(one["cache_prompt"] for one in requests)


@pytest.mark.usefixtures("without_conversion")
def test_the_next_prompt_is_sent_before_the_slowest_is_answered(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    engines = find_engines(openvino=False, llama_cpp=make_fake_server(tmp_path, ANSWERING))
    arm = engines.build("llama.cpp", settings(tiny_pair, batch=2, seed=0), models, tmp_path, 60)
    assert engines.label("llama.cpp") == "llama.cpp 77 (abc) f32"
    try:
        assert arm.complete(prompts()[:3]).emitted == 6  # the fake server refuses the first request otherwise
    finally:
        arm.close()


class Steps:
    """A test double of OpenVINO's pipeline: the first text ends after five steps, every other text after one."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.seen: list[tuple[int, ...]] = []

    def add_request(self, place: int, ids: list[int], offset: int) -> SimpleNamespace:
        self.running[place] = 5 if place == 0 else 1
        result = [SimpleNamespace(generated_ids=[offset, len(ids)])]
        return SimpleNamespace(get_status=lambda: self._status(place), read_all=lambda: result)

    def _status(self, place: int) -> SimpleNamespace:
        return SimpleNamespace(name="RUNNING" if self.running[place] else "FINISHED")

    def step(self) -> None:
        self.seen.append(tuple(place for place, left in self.running.items() if left))
        self.running = {place: max(0, left - 1) for place, left in self.running.items()}


def test_openvino_receives_the_next_prompt_when_a_text_ends(
    tiny_pair: TinyPair,  # noqa: F811
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    steps = Steps()
    monkeypatch.setattr(bench_engine_openvino, "convert_weights", lambda llama, folder, weights: folder)
    monkeypatch.setattr(bench_engine_openvino, "_tensor", lambda ids: ids)
    monkeypatch.setattr(bench_engine_openvino, "_settings", lambda request, offset, mode: offset)
    monkeypatch.setattr(bench_engine_openvino, "_pipeline", lambda *_: steps)
    config = settings(tiny_pair, batch=2)
    words = PromptWords(config, models)
    made = OpenVINOArm(request_of(config, models, tmp_path, 60), words, tmp_path).complete(prompts())
    assert steps.seen == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
    assert made.tokens == tuple((place, len(models.target_vocabulary.encode(text))) for place, text in enumerate(TEXTS))


class GenAI:
    """A test double of `openvino_genai` that returns the arguments that it receives."""

    class GenerationConfig(SimpleNamespace):
        def set_eos_token_id(self, token: int) -> None:
            self.eos = token

    SchedulerConfig = Tokenizer = staticmethod(lambda *_: None)

    @staticmethod
    def draft_model(folder: Path, *_: Any, **__: Any) -> Path:
        return folder

    @staticmethod
    def ContinuousBatchingPipeline(*_: Any, **properties: Any) -> dict[str, Any]:  # noqa: N802
        return properties


@pytest.mark.parametrize(
    ("mode", "pipeline", "lengths"),
    [
        (Mode.PLAIN, {}, {}),
        (Mode.SPECULATIVE, {"draft_model": Path("drafter")}, {"num_assistant_tokens": 3}),
        (Mode.LOOKUP, {"prompt_lookup": True}, {"num_assistant_tokens": 10, "max_ngram_size": 3}),
    ],
)
def test_each_mode_of_openvino_has_its_properties(
    mode: Mode,
    pipeline: dict[str, Any],
    lengths: dict[str, int],
    tiny_pair: TinyPair,  # noqa: F811
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "openvino_genai", GenAI)
    request = replace(request_of(settings(tiny_pair, draft__max_draft=3), models, tmp_path, 60), ends=(2, 5))
    drafter = Path("drafter") if mode is Mode.SPECULATIVE else None
    properties = bench_engine_openvino._pipeline(request, Path("target"), drafter, mode)
    assert {name: properties.get(name) for name in ("draft_model", "prompt_lookup") if name in properties} == pipeline
    made = vars(bench_engine_openvino._settings(request, 7, mode))
    assert {name: made[name] for name in ("num_assistant_tokens", "max_ngram_size") if name in made} == lengths
    assert (made["eos"], made["stop_token_ids"], made["do_sample"]) == (2, {2, 5}, False)


@pytest.mark.usefixtures("without_conversion")
def test_the_server_stops_before_pending_requests_are_awaited(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    engines = find_engines(openvino=False, llama_cpp=make_fake_server(tmp_path, ANSWERING))
    arm = engines.build("llama.cpp", settings(tiny_pair, batch=1, seed=0), models, tmp_path, 60)
    assert isinstance(arm, LlamaCppArm)
    pending = arm._pool.submit(arm._server.complete, arm._make_request(prompts()[0]))  # waits for ever
    record = tmp_path / "build" / "bin" / "llama-server.requests"
    while not record.exists():
        sleep(0.01)
    arm.close()
    with pytest.raises(UsageError, match="the connection broke"):
        pending.result()


@pytest.mark.usefixtures("without_conversion")
def test_a_target_without_an_end_is_refused(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    config = settings(tiny_pair)
    request = replace(request_of(config, models, tmp_path, 60), ends=())
    with pytest.raises(UsageError, match="needs one to 3 end-of-sequence ids"):
        LlamaCppArm(LlamaCpp(tmp_path, ""), request, PromptWords(config, models), tmp_path)


@pytest.mark.usefixtures("without_conversion")
def test_a_server_that_exits_is_refused_with_its_last_message(tiny_pair: TinyPair, models: Models, tmp_path: Path):  # noqa: F811
    found = LlamaCpp(make_fake_server(tmp_path, REFUSING) / "build/bin/llama-server", "")
    request = request_of(settings(tiny_pair), models, tmp_path, 60)
    with pytest.raises(UsageError, match="draft model vocab must match"):
        LlamaCppArm(found, request, models.target_vocabulary, tmp_path, Mode.SPECULATIVE)


@pytest.fixture
def arm_of(tiny_pair: TinyPair, models: Models, tmp_path: Path) -> Iterator[Any]:  # noqa: F811
    made: list[Arm] = []

    def build(name: str, drafter: Path = tiny_pair.drafter, **changes: Any) -> Arm:
        folder = Path(LLAMA_CPP) if name.startswith("llama.cpp") else None
        engines = find_engines(openvino=folder is None, llama_cpp=folder)
        with_drafter = replace(models, drafter_folder=drafter)
        made.append(engines.build(name, settings(tiny_pair, **changes), with_drafter, tmp_path, 60))
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


@pytest.mark.parametrize("name", ENGINES)
def test_sampling_keeps_to_lengths(name: str, arm_of: Any):
    made = arm_of(name, sampling__temperature=1.0, batch=4).complete(prompts())
    assert all(1 <= len(tokens) <= NEW_TOKENS for tokens in made.tokens)
    assert len(set(made.tokens)) > 1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ENGINES)
def test_lookup_changes_no_token(
    name: str,
    batch: int,
    arm_of: Any,
    tiny_pair: TinyPair,  # noqa: F811
    models: Models,
):
    if name == "llama.cpp" and Mode.LOOKUP not in find_llama_cpp(Path(LLAMA_CPP)).modes:
        pytest.skip("this version of llama.cpp has no lookup in its server")
    made = arm_of(f"{name}-lookup", batch=batch).complete(prompts())
    wanted = greedy(models, tiny_pair.target)
    shortest = 0 if name == "openvino" else 10  # llama.cpp stops up to a block before the limit
    for own, theirs in zip(made.tokens, wanted, strict=True):
        assert own == theirs[: len(own)]
        assert len(own) >= len(theirs) - shortest


@needs_openvino
def test_openvino_refuses_two_vocabularies(arm_of: Any):
    with pytest.raises(UsageError, match="Tokenizers for draft and main models are different"):
        arm_of("openvino-speculative")
