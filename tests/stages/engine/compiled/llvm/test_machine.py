"""Which instructions of a processor are found, asked of operating systems that are not this one's."""

import sys
from typing import Any

import pytest
from emulation import PROCESSORS

from stages.engine.compiled.llvm import machine
from stages.engine.compiled.llvm.machine import Features

I8MM, DOTPROD, NOTHING = PROCESSORS


class System:
    """What Linux and macOS answer on AArch64."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def getauxval(self, vector: int) -> int:
        found = {"asimddp": (16, 1 << 20), "asimdhp": (16, 1 << 10), "i8mm": (26, 1 << 13)}
        return sum(bit for name, (own, bit) in found.items() if own == vector and name in self._names)

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: int) -> int:
        if name.decode().removeprefix("hw.optional.arm.") not in self._names:
            return -1
        value._obj.value = 1
        return 0


@pytest.mark.parametrize(
    ("system", "names", "found"),
    [
        ("linux", ["asimdhp", "asimddp", "i8mm"], I8MM),
        ("linux", ["asimdhp", "asimddp"], DOTPROD),
        ("linux", ["asimdhp"], NOTHING),
        ("darwin", ["FEAT_DotProd", "FEAT_I8MM"], I8MM),
        ("darwin", ["FEAT_DotProd"], DOTPROD),
        ("win32", ["asimddp", "FEAT_DotProd"], NOTHING),
    ],
)
def test_aarch64_is_asked_for_products_of_bytes(
    system: str, names: list[str], found: Features, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "IS_ARM", True)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: System(*names))
    monkeypatch.setattr(machine, "_find_arm_features", machine._find_arm_features.__wrapped__)
    assert Features.detect() == found
