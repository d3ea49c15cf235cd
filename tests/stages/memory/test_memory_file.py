"""The file of a memory: the same bytes for the same memory in every process, and a memory that continues from it."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from stages.drafting.costs import Costs
from stages.memory.text_memory import TextMemory, TreeLimits, read_memory, read_table, write_memory
from store.errors import CorruptError

COSTS = Costs(((1, 1.0), (9, 1.1)), ((1, 0.1),))
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_memory_file import memory_of
from stages.memory.text_memory import write_memory
write_memory(Path(sys.argv[1]), memory_of(list(range(40)) * 2), "pair")
"""


def memory_of(text: list[int], budget_bytes: int = 1 << 20) -> TextMemory:
    memory = TextMemory(COSTS, TreeLimits(9, 3, 9), (), budget_bytes=budget_bytes)
    assert memory.table is not None
    memory.table.learn(text, 1)
    memory.calibration.observe(3, hit=True)
    return memory


@pytest.mark.sweep
def test_equal_memories_are_equal_files_in_every_process(tmp_path: Path):
    digests = set()
    for number in range(4):
        path = tmp_path / f"{number}"
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support", "PATH": ""}
        subprocess.run([sys.executable, "-c", PROGRAM, path, Path(__file__).parent], check=True, env=environment)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_memory_is_read_as_it_was_written(tmp_path: Path):
    path, memory = tmp_path / "memory", memory_of([1, 2, 3, 1, 2, 4, 1, 2])
    write_memory(path, memory, "pair")
    other = memory_of([9, 8, 7])
    assert read_memory(path, other, "pair")
    write_memory(tmp_path / "again", other, "pair")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert other.table is not None
    assert other.table.find([1, 2]) == read_table(path).find([1, 2]) != []


def test_a_larger_memory_is_cut_to_the_budget(tmp_path: Path):
    write_memory(tmp_path / "memory", memory_of(list(range(5000))), "pair")
    small = memory_of([1], budget_bytes=4096)
    assert read_memory(tmp_path / "memory", small, "pair")
    assert small.table is not None
    assert 0 < small.table.bytes <= 4096


def test_a_file_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "memory").write_bytes(b"no tensors")
    with pytest.raises(CorruptError, match="must hold the memory of a version"):
        read_table(tmp_path / "memory")
