"""Options and the early end of `omnidraft bench`: a quick run, Ctrl-C, a GGUF file as target."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from test_speed_benchmark import NEW_TOKENS, TEXTS, Parrot, folder, run  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from pipeline.bench.engines import gguf as bench_gguf
from pipeline.bench.engines.weights import load_llama
from pipeline.bench.speed.build import ReplayRecords
from pipeline.cli.bench import speed as cli_bench
from pipeline.run.rounds import Round
from store.events import Event, PromptCompleted, PromptReceived

# The parts of llama.cpp's server that the arm uses: it answers with a fixed token and records its arguments.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"tokens": [7]})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

if "--version" in sys.argv:
    print("version: 77 (abc)")
elif "--help" in sys.argv:
    print("--spec-type none,draft-simple,ngram-simple --spec-ngram-simple-size-n N --spec-ngram-simple-size-m M")
else:
    with open(__file__ + ".arguments", "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\\n")
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def report_of(path: Path) -> dict[str, Any]:
    (report,) = json.loads(path.read_text())["runs"]
    return report


@pytest.mark.slow
def test_a_quick_run_has_few_arms_and_short_completions(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS[:20]), encoding="utf-8")
    app = typer.Typer()
    app.command()(cli_bench.bench)
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--device", "cpu"]
    more = ["--threads", "1", "--quick", "--set", "draft.costs=estimated", "--json", str(tmp_path / "quick.json")]
    result = CliRunner().invoke(app, [str(prompts), *models, *more])
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "quick.json")
    assert list(report["arms"]) == ["plain", "own-plain", "memory", "logged"]
    sizes = {name: report["settings"][name] for name in ("prompts", "round_prompts", "warm_up")}
    assert sizes == {"prompts": 12, "round_prompts": 3, "warm_up": 3}
    assert report["settings"]["sampling"]["max_new_tokens"] == 32
    assert report["partial"] is False
    assert report["rounds"] == {"complete": 4, "planned": 4}


def test_options_override_the_sizes_of_a_quick_run(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    result = run(folder, "--quick", "--arms", "plain,frozen", "--json", str(tmp_path / "quick.json"))
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "quick.json")
    assert list(report["arms"]) == ["plain", "frozen"]
    assert report["settings"]["sampling"]["max_new_tokens"] == NEW_TOKENS


class Interrupted(Parrot):
    """Raises an interrupt in one of its rounds; those of the warm-up count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        if self.rounds == self._number:
            raise KeyboardInterrupt
        return super().complete(prompts)


def test_ctrl_c_prints_the_finished_rounds_as_partial(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parrot = Interrupted(2 + 1)  # after the warm-up, in the second of two rounds
    monkeypatch.setattr(cli_bench, "_engines", lambda *flags: parrot)
    arms = ("--arms", "plain,parrot,own-plain", "--batch", "1,2")
    result = run(folder, *arms, "--json", str(tmp_path / "partial.json"))
    assert result.exit_code == 130
    report = report_of(tmp_path / "partial.json")  # of batch size 1 alone
    assert report["partial"] is True
    assert report["rounds"] == {"complete": 1, "planned": 2}
    assert {len(arm["rounds"]) for arm in report["arms"].values()} == {1}
    assert "arm (partial: 1 of 2 rounds)" in result.output
    assert "1 of 2 rounds of 2 prompts" in result.output
    assert "Partial: interrupted after 1 of 2 rounds." in result.output
    assert parrot.closed == 1


def test_ctrl_c_before_a_finished_round_is_reported(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parrot = Interrupted(1)
    monkeypatch.setattr(cli_bench, "_engines", lambda *flags: parrot)
    result = run(folder, "--arms", "plain,parrot", "--json", str(tmp_path / "none.json"))
    assert result.exit_code == 130
    assert "there are no tables to show" in caplog.text
    assert not (tmp_path / "none.json").exists()
    assert parrot.closed == 1


def test_ctrl_c_inside_a_block_of_ours_leaves_the_other_rounds(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completed: list[Event] = []
    take = ReplayRecords.take

    def interrupt(self: ReplayRecords, event: Event) -> None:
        take(self, event)
        completed.extend([event] if isinstance(event, PromptCompleted) else [])
        if len(completed) == 5 + 2 + 1:  # the warm-up, the first round, and one prompt of the second
            completed.append(event)
            raise KeyboardInterrupt

    monkeypatch.setattr(ReplayRecords, "take", interrupt)
    settings = ("--set", "learn.interval=1", "--set", "draft.costs=estimated")
    result = run(folder, "--arms", "own-plain,logged", *settings, "--json", str(tmp_path / "partial.json"))
    assert result.exit_code == 130, result.output
    report = report_of(tmp_path / "partial.json")
    assert report["rounds"] == {"complete": 1, "planned": 2}
    assert {name: arm["differing"] for name, arm in report["arms"].items()} == {"own-plain": 0, "logged": 0}


def test_llama_cpp_reads_the_gguf_file_of_the_target_itself(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(bench_gguf.TYPES, "bfloat16", "Q8_0")
    llama, file = load_llama(str(folder / "target")), tmp_path / "target.gguf"
    bench_gguf.save_gguf(llama, file, "bfloat16", [llama.tokenizer.eos_token_id])
    server = tmp_path / "bin" / "llama-server"
    server.parent.mkdir()
    server.write_text(f"#!{sys.executable}\n{SERVER}", encoding="utf-8")
    server.chmod(0o755)
    arms = "plain,own-plain,llama.cpp,llama.cpp-speculative,llama.cpp-lookup"
    options = ("--target", str(file), "--llama-cpp", str(tmp_path), "--arms", arms)
    result = run(folder, *options, "--json", str(tmp_path / "gguf.json"))
    assert result.exit_code == 0, result.output
    started = [json.loads(line) for line in Path(f"{server}.arguments").read_text().splitlines()]
    assert [words[words.index("--model") + 1] for words in started] == [str(file)] * 3
    drafter = started[1][started[1].index("--model-draft") + 1]
    assert Path(drafter).name == "drafter.gguf"
    assert started[2][started[2].index("--spec-type") + 1] == "ngram-simple"
    report = report_of(tmp_path / "gguf.json")
    assert report["labels"] == {
        "llama.cpp": "llama.cpp 77 (abc) Q8_0",
        "llama.cpp-speculative": "llama.cpp 77 (abc) Q8_0, speculative, k=5",
        "llama.cpp-lookup": "llama.cpp 77 (abc) Q8_0, lookup, n=3, k=10",
    }
    assert report["arms"]["own-plain"]["differing"] == 0, "ours and transformers read the same weights"
