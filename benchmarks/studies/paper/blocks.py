"""Parts of the OmniDraft paper's tables and figures as studies: tasks, arms, and blocks of them.

A block is one part of a table, such as a task or a temperature; it is a study of its own, with its own file of runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.studies.definitions import FIXED, PaperColumn, Study, StudyArm

NONE, HYBRID = "none", "hybrid"

Pair = tuple[float, float]  # the paper's acceptance rate and speed-up


@dataclass(frozen=True)
class PaperTask:
    """A task of the paper."""

    name: str  # on the command line
    title: str  # in the paper's tables
    files: tuple[str, ...]  # data sets in a folder of data, read one after the other
    # estimated probability of a rejection at which a draft stops, as the paper recommends for the task
    threshold: float
    parts: int = 0  # number of parts of equal length that the stream is divided into, of which each file is one

    def prompts_of_file(self, limit: int) -> int:
        """Number of prompts from each file of a stream of `limit` prompts."""
        return max(1, limit // (self.parts or len(self.files)))


GSM8K = PaperTask("gsm8k", "GSM8K", ("gsm8k.parquet",), 0.7)
CODE = PaperTask("code", "MBPP+HE", ("mbpp.parquet", "humaneval.parquet"), 0.7)
ALPACA = PaperTask("alpaca", "Alpaca", ("alpaca.parquet",), 0.3)
SUMMARIES = PaperTask("summaries", "XSum", ("dialogsum.parquet", "scitldr.parquet"), 0.3)
TASKS = (GSM8K, CODE, ALPACA, SUMMARIES)
# Of figure 5: a stream that changes in the middle, and its second half alone.
SWITCH = PaperTask("switch", "GSM8K, then MBPP", ("gsm8k.parquet", "mbpp.parquet"), 0.7)
MBPP = PaperTask("mbpp", "MBPP", ("mbpp.parquet",), 0.7, parts=2)


@dataclass(frozen=True)
class CacheSize:
    """The paper's cache of a task after training: entries, megabytes, and training prompts."""

    entries: int
    megabytes: float
    prompts: int

    @property
    def bytes_per_entry(self) -> float:
        """The paper's number of bytes of an entry, as Python objects."""
        return self.megabytes * 1e6 / self.entries

    @property
    def entries_per_prompt(self) -> float:
        """The paper's number of entries per training prompt."""
        return self.entries / self.prompts


@dataclass(frozen=True)
class PaperBlock:
    """A part of a table."""

    name: str  # on the command line and of its file
    title: str  # in the tables
    task: PaperTask  # where its prompts come from
    study: Study  # its arms and the paper's columns
    # the paper's accepted n-grams per response, by arm; empty where it gives none
    hits: Mapping[str, float] = field(default_factory=dict)
    cache: CacheSize | None = None  # the paper's size of the cache; None where it gives none

    @property
    def reference(self) -> str:
        """Name of the arm that the others are compared with."""
        return self.study.references[0]


def make_block(
    of: str,
    title: str,
    task: PaperTask,
    arms: tuple[StudyArm, ...],
    columns: Mapping[str, Mapping[str, Pair]],
    *,
    name: str = "",
    settings: Mapping[str, Any] = FIXED,
    reference: str = NONE,
    **more: Any,
) -> PaperBlock:
    """Make a block of `of`, such as `table-1`. `columns`: the paper's numbers by arm, by the title of the column."""
    name = name or task.name
    paper = tuple(PaperColumn(heading, of.replace("-", " "), values) for heading, values in columns.items())
    study = Study(f"paper-{of}-{name}", settings, arms, (reference,), paper, "")
    return PaperBlock(name, title, task, study, **more)


WITHOUT_CACHE = {"cache.policy": "off"}
NO_LEARNING = StudyArm(NONE, {"learn.enabled": False, **WITHOUT_CACHE})
DIRECT_ONLY = StudyArm("direct only", {"learn.loss": "direct", **WITHOUT_CACHE})
HYBRID_ARM = StudyArm(HYBRID, {"learn.loss": "hybrid"})
TRIE = StudyArm("trie", {"learn.loss": "trie"})
