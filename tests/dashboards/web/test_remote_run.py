"""The dashboards over a run on an object store."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from object_serving import objects, place  # noqa: F401  (fixtures)
from places import ROOT
from stream_making import append, prompt

from store.log.run_log import RunLog
from store.object_store.mirror import ObjectMirror

PROGRAM = """
import typer
import pipeline.cli.pages
pipeline.cli.pages.LOOK_SECONDS = 0.1
typer.run(pipeline.cli.pages.dashboard)
"""


def prompts_shown(address: str) -> int:
    with urllib.request.urlopen(f"{address}/api/states", timeout=30) as answer:
        (state,) = json.loads(answer.read())
    assert state["name"] == "run"
    return state["prompts"]


@pytest.mark.slow
def test_a_run_on_an_object_store_is_shown_and_followed(place: str, tmp_path: Path):  # noqa: F811
    mirror = ObjectMirror(tmp_path, place)
    mirror.pull()
    with RunLog(tmp_path, mirror=mirror) as log:
        append(log, [prompt(0)], commit=True)
        words = [sys.executable, "-c", PROGRAM, "--run", place, "--port", "0"]
        command = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+", command.stdout.readline())
            assert prompts_shown(address) == 1
            append(log, [prompt(1)], commit=True)
            end = time.monotonic() + 60
            while prompts_shown(address) == 1:
                assert time.monotonic() < end, "the second commit is not shown"
                time.sleep(0.1)
            assert prompts_shown(address) == 2
        finally:
            command.terminate()
            command.wait(30)
