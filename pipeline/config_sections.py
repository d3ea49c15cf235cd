"""The sections of a run's configuration: each setting with its default, its range and its meaning.

The descriptions are the only place where a setting is explained; the command line's help takes them from here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Texts = Annotated[tuple[str, ...], Field(strict=False)]  # files hold lists where this wants tuples
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and values of a wrong type."""

    # Strict: `batch = "2"` and `batch = true` are mistakes, and a guess would hide them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SourceSettings(Section):
    """How rows of a source become prompts."""

    prompt_field: str | None = Field(
        default=None,
        min_length=1,
        description="Column that holds the prompt; by default 'prompt' or a usual name for it.",
    )
    template: str | None = Field(
        default=None,
        min_length=1,
        description="Text made from a row's columns, such as 'Question: {prompt}\\nAnswer:'.",
    )
    where: Texts = Field(default=(), description="Conditions 'column=value' or 'column!=value' on text; all must hold.")
    limit: int | None = Field(default=None, ge=1, description="Most prompts taken from one source.")
    target_field: str = Field(
        default="target",
        min_length=1,
        description="With several targets: the column that names a row's target, where there is one.",
    )
    chat: bool = Field(default=False, description="Whether prompts are put into the target's chat template.")
    chat_template: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="A Jinja file to use instead of the target's own chat template."
    )


class SamplingSettings(Section):
    """The target's law, which the output keeps."""

    temperature: float = Field(default=0.0, ge=0, description="Temperature of the target; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Least probability mass kept; 1 keeps all.")
    top_k: int = Field(default=0, ge=0, description="Number of likeliest tokens kept; 0 keeps all.")
    max_new_tokens: int = Field(default=64, ge=1, description="Most target tokens in one completion.")


class DraftSettings(Section):
    """How far and by which rule the drafter runs ahead."""

    mode: Literal["trie", "match", "tli", "paper"] = Field(
        default="trie", description="Verification rule; all but 'paper' keep the target's law."
    )
    max_draft: int = Field(default=5, ge=0, le=64, description="Most pieces drafted per block; 0 decodes plainly.")
    adapt: bool = Field(default=True, description="Whether the adaptive head decides when a draft stops.")
    stop_rule: Literal["cost", "threshold", "never"] = Field(
        default="cost", description="The head's rule: best expected speed, a fixed estimate, or only max_draft."
    )
    stop_threshold: Share = Field(
        default=0.7, description="With stop_rule 'threshold': stop at this estimated chance of a rejection."
    )
    costs: Literal["measured", "estimated"] = Field(
        default="measured",
        description="Whether draft lengths follow costs measured on this machine, once, or estimated from model sizes.",
    )
    relative_cost: float | None = Field(
        default=None, ge=0, description="Cost of one more drafted piece in target passes, instead of costs."
    )
    only_where_paying: bool = Field(
        default=True, description="Whether drafting rests while plain decoding would be faster."
    )
    weights: Literal["fastest", "int8"] = Field(
        default="fastest",
        description="Layout of the drafter's weights: the fastest of equal ones, or eight bits, a little worse and on "
        "most machines faster from tens of millions of parameters.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Temperature of the drafter; by default sampling.temperature."
    )
    lookup: bool = Field(
        default=True, description="Whether text that repeats itself is drafted by copying it, where that pays better."
    )
    max_lookup: int = Field(default=10, ge=1, le=64, description="Most pieces copied per block.")


class VocabularySettings(Section):
    """What special tokens of the target mean to the drafter. BOS, EOS, PAD and equal names match by themselves."""

    special: Literal["spell", "block"] = Field(
        default="block",
        description="The target's other special tokens: spelt out in the drafter's pieces, or never drafted.",
    )
    special_names: Texts = Field(
        default=(),
        description="Exceptions 'TARGET=DRAFTER', such as '<|eot_id|>=</s>'; DRAFTER may be 'spell' or 'block'.",
    )


class CacheSettings(Section):
    """The n-gram cache: target tokens that are spelled by several drafter pieces."""

    policy: Literal["lru", "lfu", "unbounded", "off"] = Field(
        default="lfu", description="Which entry leaves a full cache; 'unbounded' never evicts, 'off' keeps no n-grams."
    )
    budget_bytes: int = Field(default=4_194_304, ge=1, description="Memory for entries, in bytes.")
    seed: Literal["none", "vocabulary", "text"] = Field(
        default="none",
        description="What fills the cache at the start: nothing, every n-gram of the vocabularies, or those of a text.",
    )
    seed_text: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="With seed 'text': a file of text whose commonest n-grams fill the cache."
    )


class LearnSettings(Section):
    """How the drafter and its head learn while the stream runs."""

    enabled: bool = Field(default=True, description="Whether anything learns.")
    loss: Literal["hybrid", "direct", "trie", "acceptance"] = Field(default="trie", description="The drafter's loss.")
    interval: int = Field(default=4, ge=1, description="Prompts between two updates; the fewest with spacing 'paying'.")
    spacing: Literal["fixed", "paying"] = Field(
        default="paying", description="Whether updates wait longer while they do not repay themselves."
    )
    longest_interval: int = Field(default=64, ge=1, description="Most prompts between two updates with 'paying'.")
    horizon: int = Field(
        default=1000, ge=1, description="Prompts for which an update is taken to be worth something, with 'paying'."
    )
    piece_cost: float | None = Field(
        default=None,
        ge=0,
        description="Cost of training on one piece once, in target passes; by default estimated from the models.",
    )
    lag: int = Field(
        default=4,
        ge=0,
        description="Prompts between handing an update in and adopting it, while a thread of its own computes it; 0 "
        "computes it in place. Adapters (lora) always take 0.",
    )
    steps: int = Field(default=2, ge=1, description="Gradient steps per update.")
    rate: float = Field(default=1e-3, gt=0, description="Learning rate of the drafter.")
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay of the drafter.")
    ngram_weight: float = Field(default=0.2, ge=0, description="Weight of merged tokens in the hybrid loss.")
    acceptance_blend: Share = Field(default=0.5, description="Share of the acceptance term in the acceptance loss.")
    teacher_top: int = Field(default=64, ge=1, description="Likeliest target tokens kept per position as the teacher.")
    off_policy: bool = Field(
        default=False, description="Whether drafted positions behind the first rejection teach as well."
    )
    lora: bool = Field(
        default=False, description="Whether each target trains an adapter of its own over one frozen drafter."
    )
    lora_rank: int = Field(default=32, ge=1, description="Rank of the adapters.")
    teacher_temperature: float | None = Field(
        default=None,
        gt=0,
        description="Temperature of the laws that teach; by default that of the sampling, but 0.5 at least.",
    )
    replay_prompts: int = Field(
        default=256, ge=0, description="Past prompts kept to learn from again, an even sample of all; 0 keeps none."
    )
    gate_share: float = Field(default=0.15, ge=0, lt=1, description="Share of the prompts held out to judge updates.")
    gate_tolerance: Share = Field(
        default=0.01, description="Fall of expected acceptance that still lets an update serve."
    )
    gate_window: int = Field(default=12, ge=1, description="Held-out prompts that the gate looks back on.")
    clip: float = Field(default=1.0, gt=0, description="Largest norm of a gradient.")
    head_schedule: Literal["joint", "interleaved"] = Field(
        default="interleaved", description="Whether the head learns with the drafter or in turn with it."
    )
    head_rate: float = Field(default=5e-3, gt=0, description="Learning rate of the head.")
    head_batch: int = Field(default=256, ge=1, description="Labelled pieces per step of the head.")
    head_buffer: int = Field(default=8192, ge=1, description="Most labelled pieces kept for the head.")


class DriftSettings(Section):
    """When a change of the acceptance rate counts as drift. Detectors are river's, names included."""

    detector: Literal["adwin", "page-hinkley", "none"] = Field(
        default="page-hinkley", description="The drift detector."
    )
    delta: float = Field(default=0.002, gt=0, lt=1, description="ADWIN's chance of a false alarm.")
    grace: int = Field(default=5, ge=1, description="Prompts before the first possible alarm.")
    threshold: float = Field(default=3.0, gt=0, description="Page-Hinkley's summed deviation that raises the alarm.")
    tolerance: float = Field(default=0.05, ge=0, description="Page-Hinkley's deviation that does not count.")
    answer: Literal["reset", "recall", "none"] = Field(
        default="recall",
        description="After a fall: begin the head anew, take back an earlier version that does better too, or nothing.",
    )
    recall_margin: Share = Field(
        default=0.02, description="By how much an earlier version must beat the present one to be taken back."
    )
    recall_versions: int = Field(default=12, ge=1, description="Most earlier versions that are scored.")
    cooldown: int = Field(default=20, ge=0, description="Prompts after a reset in which no other one happens.")
    signal: Literal["auto", "judged", "first"] = Field(
        default="auto", description="What is watched: all judged tokens, or only the first one of each block."
    )


class PublishSettings(Section):
    """When the drafter, its head and its cache become a version, and where it is registered."""

    enabled: bool = Field(default=True, description="Whether versions are published.")
    interval: int = Field(default=64, ge=1, description="Prompts between two versions.")
    mlflow_uri: str | None = Field(default=None, min_length=1, description="MLflow server; by default a local store.")
    name: str = Field(default="omnidraft-drafter", min_length=1, description="Name of the registered model.")
    probe: bool = Field(default=True, description="Whether every version is measured on the fixed probe.")


class LogSettings(Section):
    """What the token log keeps."""

    text: bool = Field(
        default=True, description="Whether the log keeps prompts, texts and tokens' bytes; ids are kept in any case."
    )


class CommitSettings(Section):
    """When what happened is committed, with a checkpoint to go on from. The first that is due counts."""

    prompts: int = Field(default=256, ge=1, description="Prompts after which a commit is due.")
    seconds: float = Field(default=10.0, gt=0, description="Seconds after which a commit is due.")
    share: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="Most of a run's time that commits may take: where one takes long, the next waits longer.",
    )


class ServeSettings(Section):
    """Live requests: `omnidraft serve`."""

    learn: Literal["live", "shadow", "off"] = Field(
        default="live",
        description="Whether requests teach the drafter: put into service at once, only published as versions, or not.",
    )
    learn_share: float = Field(
        default=0.2, gt=0, description="Most of one core that the learner may use, beside serving."
    )
    waiting: int = Field(default=256, ge=1, description="Requests that may wait; more are told to come again later.")
    max_tokens: int = Field(default=4096, ge=1, description="Most target tokens of one completion.")
    choices: int = Field(default=16, ge=1, description="Most completions of one request.")
    body_bytes: int = Field(default=1 << 20, ge=1, description="Largest body of a request, in bytes.")
    deadline_seconds: float = Field(
        default=300.0, gt=0, description="Seconds after which a request ends, waiting included."
    )
    grace_seconds: float = Field(
        default=30.0, ge=0, description="Seconds that requests may go on when the server is told to end."
    )
