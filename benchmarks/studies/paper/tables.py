"""The tables of the OmniDraft paper as studies: their blocks, arms and numbers (arXiv 2507.02659v3).

The paper measures accepted / *proposed* after training on other prompts, with targets of 7B and more on one
accelerator; ours are rates while learning. Only ratios between arms can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.studies.definitions import FIXED, LONGEST, STUDIES, StudyArm, StudyName
from benchmarks.studies.paper.blocks import (
    ALPACA,
    CODE,
    DIRECT_ONLY,
    GSM8K,
    HYBRID,
    HYBRID_ARM,
    NO_LEARNING,
    NONE,
    SUMMARIES,
    TRIE,
    WITHOUT_CACHE,
    CacheSize,
    Pair,
    PaperBlock,
    PaperTask,
    make_block,
)

# AdamW's steps with this rate are below the precision of any weight: the drafter stays as loaded, bit for bit.
NO_STEP = 1e-30


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    number: str  # in the paper; `lora` for its sweep over the ranks of adapters
    title: str  # what it compares
    blocks: tuple[PaperBlock, ...]  # its parts, in the order of the page
    remark: str  # how to read the paper's numbers next to ours


_CLOSED_FORM = {"learn.loss": "trie", "learn.method": "least-squares"}
_COPIES = ("own", "memory")
# Arms that the paper does not have.
_OURS = (
    StudyArm("no drafts", {"learn.enabled": False, "draft.max_draft": 0, **WITHOUT_CACHE}),
    TRIE,
    StudyArm("closed form", _CLOSED_FORM),
    StudyArm("memory", {"learn.enabled": False, "draft.sources": _COPIES}),
    StudyArm("memory and closed form", {**_CLOSED_FORM, "draft.sources": (*_COPIES, "model")}),
)


def _table_1() -> PaperTable:
    arms = (
        NO_LEARNING,
        DIRECT_ONLY,
        HYBRID_ARM,
        StudyArm("hybrid, LoRA", {"learn.loss": "hybrid", "learn.lora_rank": 32}),
    )
    names = [arm.name for arm in arms]
    numbers: dict[PaperTask, dict[str, tuple[Pair, ...]]] = {
        GSM8K: {
            "Llama3-8B": ((0.10, 0.94), (0.32, 1.58), (0.42, 1.70), (0.37, 1.59)),
            "Qwen2-7B": ((0.14, 1.04), (0.33, 1.50), (0.37, 1.61), (0.31, 1.41)),
        },
        CODE: {
            "Llama3-8B": ((0.09, 1.03), (0.22, 1.26), (0.27, 1.33), (0.19, 1.28)),
            "Qwen2-7B": ((0.09, 0.91), (0.22, 1.29), (0.26, 1.36), (0.21, 1.21)),
        },
        ALPACA: {
            "Llama3-8B": ((0.09, 0.96), (0.16, 1.25), (0.20, 1.30), (0.17, 1.21)),
            "Qwen2-7B": ((0.13, 1.01), (0.17, 1.25), (0.20, 1.30), (0.18, 1.25)),
        },
        SUMMARIES: {
            "Llama3-8B": ((0.11, 0.91), (0.20, 1.20), (0.24, 1.24), (0.23, 1.21)),
            "Qwen2-7B": ((0.12, 0.96), (0.19, 1.16), (0.22, 1.22), (0.22, 1.21)),
        },
    }
    blocks = tuple(
        make_block(
            "table-1",
            task.title,
            task,
            (*arms, *_OURS),
            {of: dict(zip(names, row, strict=True)) for of, row in by.items()},
        )
        for task, by in numbers.items()
    )
    return PaperTable(
        "1",
        "losses on four tasks",
        blocks,
        "Paper: Llama-68M drafter; none = SpD_DM, direct only = L_DM, hybrid = L_DM + λ L_N. It has no other arms. "
        "Its fourth task is XSum; ours is DialogSum, then SciTLDR.",
    )


def _table_2() -> PaperTable:
    numbers: dict[PaperTask, tuple[Pair, ...]] = {
        GSM8K: ((0.21, 1.44), (0.38, 1.50), (0.42, 2.20), (0.52, 2.15)),
        CODE: ((0.14, 1.22), (0.28, 1.34), (0.35, 1.92), (0.48, 1.94)),
        ALPACA: ((0.20, 1.44), (0.38, 1.52), (0.25, 1.57), (0.41, 1.60)),
        SUMMARIES: ((0.20, 1.42), (0.38, 1.51), (0.23, 1.53), (0.38, 1.58)),
    }
    with_lora: dict[PaperTask, tuple[Pair, ...]] = {
        GSM8K: ((0.37, 1.95), (0.49, 1.94)),
        CODE: ((0.24, 1.52), (0.38, 1.61)),
        ALPACA: ((0.25, 1.54), (0.42, 1.58)),
        SUMMARIES: ((0.23, 1.49), (0.39, 1.55)),
    }
    blocks = []
    for task, row in numbers.items():
        arms = _head_arms(task.threshold)
        values = dict(zip((arm.name for arm in arms), (*row, *with_lora[task]), strict=False))
        settings = {"learn.enabled": True, "draft.width": 1}
        blocks.append(make_block("table-2", task.title, task, arms, {"Vicuna-7B": values}, settings=settings))
    return PaperTable(
        "2",
        "the adaptive head on four tasks (tables 2 and 11)",
        tuple(blocks),
        "Paper: Vicuna-7B, whose vocabulary is the drafter's; none = SpD. Drafts have five pieces, or end at the "
        "threshold that the paper recommends for the task, or after eight pieces. adapt only: the head learns; the "
        "drafter's updates are computed, but with a learning rate that changes nothing, so it takes too many seconds. "
        "cost: our rule, which the paper does not have. Its fourth task is XSum; ours is DialogSum, then SciTLDR.",
    )


def _head_arms(threshold: float) -> tuple[StudyArm, ...]:
    adaptive = {"draft.max_draft": LONGEST}
    at_threshold = {**adaptive, "draft.stop": threshold}
    learned: dict[str, Mapping[str, Any]] = {
        "distil only": FIXED,
        "interleaved": at_threshold,
    }
    return (
        StudyArm(NONE, {**FIXED, "learn.enabled": False}),
        StudyArm("adapt only", {**at_threshold, "learn.rate": NO_STEP}),
        *(StudyArm(name, settings) for name, settings in learned.items()),
        *(StudyArm(f"{name}, LoRA", {**settings, "learn.lora_rank": 32}) for name, settings in learned.items()),
        StudyArm("cost", {**adaptive, "draft.stop": "cost"}),
    )


def _table_3() -> PaperTable:
    numbers: dict[PaperTask, dict[str, tuple[Pair, Pair]]] = {
        GSM8K: {
            "7B, 68M": ((0.15, 1.02), (0.401, 1.66)),
            "14B, 68M": ((0.15, 1.17), (0.407, 1.92)),
            "32B, 68M": ((0.153, 1.30), (0.42, 2.05)),
            "7B, 160M": ((0.18, 0.70), (0.47, 1.12)),
            "14B, 160M": ((0.178, 0.89), (0.472, 1.40)),
            "32B, 160M": ((0.187, 1.03), (0.49, 1.62)),
        },
        CODE: {
            "7B, 68M": ((0.10, 0.94), (0.27, 1.33)),
            "14B, 68M": ((0.10, 1.14), (0.272, 1.57)),
            "32B, 68M": ((0.10, 1.23), (0.274, 1.71)),
            "7B, 160M": ((0.13, 0.60), (0.32, 0.90)),
            "14B, 160M": ((0.13, 0.84), (0.33, 1.19)),
            "32B, 160M": ((0.133, 0.97), (0.335, 1.40)),
        },
    }
    blocks = tuple(
        make_block(
            "table-3",
            task.title,
            task,
            (NO_LEARNING, HYBRID_ARM, TRIE),
            {of: dict(zip((NONE, HYBRID), row, strict=True)) for of, row in by.items()},
        )
        for task, by in numbers.items()
    )
    return PaperTable(
        "3",
        "sizes of target and drafter",
        blocks,
        "Paper: Qwen2.5 targets; the columns name the target and the drafter. Ours: a table for each --target; "
        "`omnidraft pad` makes larger targets with the same outputs.",
    )


def _table_4() -> PaperTable:
    sizes = {
        GSM8K: CacheSize(5569, 1.372, 7473),
        CODE: CacheSize(2238, 0.501, 910),
        ALPACA: CacheSize(20339, 4.569, 8000),
        SUMMARIES: CacheSize(17013, 3.924, 8000),
    }
    arm = StudyArm(HYBRID, {"learn.loss": "hybrid", "cache.policy": "unbounded"})
    blocks = tuple(
        make_block("table-4", task.title, task, (arm,), {}, reference=HYBRID, cache=size)
        for task, size in sizes.items()
    )
    return PaperTable(
        "4",
        "size of the n-gram cache",
        blocks,
        "Paper: Llama-68M drafter, Qwen2-7B, the cache after training on 7,473, 910, 8,000 and 4,000 or 8,000 prompts "
        "(it names both for XSum; 8,000 is taken), as Python objects. Ours: the bytes that the budget counts.",
    )


def _table_5() -> PaperTable:
    arms = (
        NO_LEARNING,
        StudyArm("cache only", {"learn.enabled": False}),
        DIRECT_ONLY,
        StudyArm("direct", {"learn.loss": "direct"}),
        HYBRID_ARM,
        TRIE,
    )
    names = [arm.name for arm in arms[:5]]
    rows: dict[int, tuple[tuple[Pair, ...], tuple[float, ...]]] = {
        3: (((0.16, 1.04), (0.20, 1.16), (0.40, 1.59), (0.42, 1.61), (0.46, 1.66)), (0, 0.87, 0, 0.48, 2.40)),
        4: (((0.12, 1.01), (0.16, 1.11), (0.32, 1.51), (0.35, 1.54), (0.41, 1.61)), (0, 1.49, 0, 0.75, 3.66)),
    }
    blocks = tuple(
        make_block(
            "table-5",
            f"k={k}",
            GSM8K,
            arms,
            {"Llama3-8B": dict(zip(names, row, strict=True))},
            name=f"k{k}",
            settings={**FIXED, "draft.max_draft": k},
            hits=dict(zip(names, hits, strict=True)),
        )
        for k, (row, hits) in rows.items()
    )
    return PaperTable(
        "5",
        "draft lengths and n-grams on GSM8K",
        blocks,
        "Paper: Llama3-8B; cache only = + N-gram post-processing, direct = L_DM + post-processing. Its n-gram hits are "
        "counts per response.",
    )


def _table_6() -> PaperTable:
    rows: dict[float, tuple[Pair, ...]] = {
        0.01: ((0.09, 0.86), (0.368, 1.51), (0.375, 1.57), (0.376, 1.57)),
        1.0: ((0.07, 0.79), (0.271, 1.23), (0.273, 1.27), (0.275, 1.31)),
    }
    others = ("n-grams", "likelihood")
    arms = (
        NO_LEARNING,
        DIRECT_ONLY,
        *(StudyArm(name, {"learn.loss": name}) for name in others),
        HYBRID_ARM,
        TRIE,
        StudyArm("acceptance", {"learn.loss": "acceptance"}),
    )
    blocks = tuple(
        make_block(
            "table-6",
            f"temperature {temperature:g}",
            GSM8K,
            arms,
            {"Llama3-8B": dict(zip((*others, HYBRID, "trie"), row, strict=True))},
            name=f"t{temperature:g}",
            settings={**FIXED, "sampling.temperature": temperature},
            reference=HYBRID,
        )
        for temperature, row in rows.items()
    )
    return PaperTable(
        "6",
        "losses at two temperatures on GSM8K",
        blocks,
        "Paper: Llama3-8B; n-grams = N-gram NLL only, likelihood = DM-NLL + N-NLL, hybrid = DM-KL + N-NLL. trie is "
        "next to its DM-KL + N-KL, the approximate divergence over n-grams; ours is the divergence of the trie, "
        "without approximation.",
    )


def _table_lora() -> PaperTable:
    row: dict[int, Pair] = {
        8: (0.30, 1.478),
        16: (0.34, 1.543),
        32: (0.37, 1.595),
        64: (0.38, 1.625),
        128: (0.38, 1.632),
    }
    arms = tuple(StudyArm(f"rank {rank}", {"learn.loss": "hybrid", "learn.lora_rank": rank}) for rank in row)
    block = make_block(
        "table-lora",
        GSM8K.title,
        GSM8K,
        (*arms, HYBRID_ARM),
        {"Llama3-8B": {f"rank {rank}": pair for rank, pair in row.items()}},
        reference="rank 32",
    )
    return PaperTable(
        "lora",
        "ranks of the LoRA adapters on GSM8K",
        (block,),
        "Paper: Llama3-8B, Llama-68M drafter, whose hidden size is 768; that of ours is 192 or 256, so rank 128 is no "
        "small share of it. hybrid trains all weights.",
    )


def _table_14() -> PaperTable:
    study = STUDIES[StudyName.CACHE]
    values = study.paper[0].values
    block = make_block(
        "table-14", CODE.title, CODE, study.arms, {"Qwen2-7B": values}, settings=study.settings, reference="full"
    )
    return PaperTable("14", "budgets of the n-gram cache on code", (block,), study.remark)


PAPER_TABLES: Mapping[str, PaperTable] = {
    table.number: table
    for table in (
        _table_1(),
        _table_2(),
        _table_3(),
        _table_4(),
        _table_5(),
        _table_6(),
        _table_14(),
        _table_lora(),
    )
}
