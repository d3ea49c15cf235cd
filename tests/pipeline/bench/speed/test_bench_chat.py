"""`omnidraft bench` with a chat template: every arm reads the same token ids."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_speed_benchmark import BY_DEFAULT, PROMPTS, TEXTS, WARM_UP, folder, run  # noqa: F401  (a fixture)

from pipeline.assembly import admission
from pipeline.assembly.models import load_models
from pipeline.bench.engines import engines as bench_engines
from pipeline.bench.engines.engines import OtherEngines
from pipeline.bench.engines.llamacpp import LlamaCpp
from pipeline.bench.speed import build as bench_build
from pipeline.config.settings import Config
from stages.engine.models.huggingface import load_tokenizer
from stages.tools.transformers_baselines import ContinuousBatching
from store.events import PromptReceived

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.bench.speed.text_arms import PromptWords

TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<answer>"
Read = dict[str, set[tuple[int, ...]]]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A file with a chat template."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The token ids that each way to complete prompts reads; filled while the benchmark runs."""
    found: Read = {}

    def note(name: str, prompts: Any) -> None:
        found.setdefault(name, set()).update(map(tuple, prompts))

    def method(name: str) -> None:
        real: Callable[..., Any] = getattr(bench_build, name)

        def complete(target: Any, prompts: Any, *rest: Any, **named: Any) -> Any:
            note(name, prompts)
            return real(target, prompts, *rest, **named)

        monkeypatch.setattr(bench_build, name, complete)

    for name in ("greedy_generate", "assisted_generate", "prompt_lookup"):
        method(name)
    batching, row = ContinuousBatching.complete, admission.SequenceState

    def continuous(self: ContinuousBatching, prompts: Any) -> Any:
        note("continuous", prompts)
        return batching(self, prompts)

    def ours(offset: int, prompt: str, dataset: str, text: str, tokens: list[int], *rest: Any) -> Any:
        if dataset == "prompts":  # the fixed probe of versions has texts of its own
            note("ours", [tokens])
        return row(offset, prompt, dataset, text, tokens, *rest)

    monkeypatch.setattr(ContinuousBatching, "complete", continuous)
    monkeypatch.setattr(admission, "SequenceState", ours)
    return found


def chat_ids(folder: Path) -> set[tuple[int, ...]]:  # noqa: F811
    """The prompts in the template, as the target's own tokenizer cuts them."""
    tokenizer = load_tokenizer(str(folder / "target"))
    texts = [f"<user> {text}\n<answer>" for text in TEXTS[: PROMPTS + WARM_UP]]
    return {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}


@pytest.mark.slow
def test_all_arms_read_the_same_chat_prompts(folder: Path, template: Path, read: Read) -> None:  # noqa: F811
    chat = ("--chat", "--set", f"source.chat_template={template}")
    result = run(folder, *chat, "--set", "draft.costs=estimated", "--json", str(folder / "chat.json"))
    assert result.exit_code == 0, result.output
    expected = chat_ids(folder)
    assert set(read) == {"greedy_generate", "assisted_generate", "prompt_lookup", "continuous", "ours"}
    assert {name: ids - expected for name, ids in read.items()} == {name: set() for name in read}
    assert min(map(len, read.values())) >= PROMPTS
    (report,) = json.loads((folder / "chat.json").read_text())["runs"]
    assert {name: arm["differing"] for name, arm in report["arms"].items()} == dict.fromkeys(BY_DEFAULT, 0)
    assert report["chat"] == f"chat: prompts are put into the chat template of {folder / 'target'}"
    assert f"Chat: prompts are put into the chat template of {folder / 'target'}" in result.output


def test_no_chat_completes_prompts_as_text(folder: Path, template: Path, read: Read) -> None:  # noqa: F811
    more = ("--no-chat", "--set", f"source.chat_template={template}", "--arms", "plain,own-plain")
    result = run(folder, *more, "--json", str(folder / "text.json"))
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(str(folder / "target"))
    texts = {tuple(tokenizer(text)["input_ids"]) for text in TEXTS[: PROMPTS + WARM_UP]}
    assert read == {"greedy_generate": read["greedy_generate"], "ours": texts}
    assert read["greedy_generate"] <= texts
    assert json.loads((folder / "text.json").read_text())["runs"][0]["chat"] is None


@pytest.mark.parametrize("engine", ["openvino", "llama.cpp"])
def test_other_engines_read_them_too(
    engine: str,
    folder: Path,  # noqa: F811
    template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[PromptWords] = []
    monkeypatch.setattr(bench_engines, "OpenVINOArm", lambda request, words, *rest, **named: given.append(words))
    monkeypatch.setattr(bench_engines, "LlamaCppArm", lambda found, request, words, *rest, **named: given.append(words))
    models = {"targets": (str(folder / "target"),), "drafter": str(folder / "drafter"), "device": "cpu"}
    config = Config().with_overrides(models | {"source.chat": True, "source.chat_template": template})
    (loaded,) = load_models(config, "", tmp_path)
    OtherEngines("1.0", LlamaCpp(tmp_path, "1.0")).build(engine, config, loaded, tmp_path, 64)
    (words,) = given
    prompts = [PromptReceived(place, str(place), "prompts", place, text) for place, text in enumerate(TEXTS)]
    assert {tuple(words.encode(prompt)) for prompt in prompts[: PROMPTS + WARM_UP]} == chat_ids(folder)
    ids = words.encode(prompts[0])
    assert words.decode(ids) == loaded.target_vocabulary.decode(ids)
