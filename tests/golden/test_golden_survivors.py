"""What was promised to survive when the house was made small (`survives.txt`) is still in the frozen interfaces.

`leaves.txt` lists what went and what takes its place; nothing in it may be promised as well.
"""

import json
from pathlib import Path

import pytest
from typing_commands import FROZEN

HERE = Path(__file__).parent


def listed(name: str) -> list[str]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def frozen(name: str) -> dict:
    return json.loads((FROZEN / f"{name}.json").read_text(encoding="utf-8"))


def test_nothing_is_promised_that_leaves():
    assert not set(listed("survives.txt")) & {line.partition(":")[0] for line in listed("leaves.txt")}


@pytest.mark.parametrize("promise", listed("survives.txt"))
def test_a_promised_interface_survives(promise):
    kind, *words = promise.split()
    if kind == "command":
        assert f"omnidraft {' '.join(words)}" in frozen("commands")
    elif kind == "setting":
        assert words[0] in frozen("settings")
    elif kind == "route":
        app, route, methods = words
        assert {*methods.split(",")} <= {*frozen("routes")[app][route]}
    else:
        assert kind in ("table", "view", "recipe")
        names = frozen(f"{kind}s")
        assert words[0] in (names["tables"] if kind == "table" else names)
