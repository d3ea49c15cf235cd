"""The sections of a run's configuration: each setting with its default, its range and its meaning.

The descriptions are the only place where a setting is explained; the command line's help takes them from here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Texts = Annotated[tuple[str, ...], Field(strict=False)]  # files hold lists where this wants tuples
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
SourceName = Literal["own", "memory", "model"]
Sources = Annotated[tuple[SourceName, ...], Field(strict=False)]
WeightFormat = Literal["auto", "fastest", "codes", "codes8", "int8", "int4"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and values of a wrong type."""

    # Strict: `batch = "2"` and `batch = true` are mistakes, and a guess would hide them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SourceSettings(Section):
    """How prompts are made from the rows of a source."""

    prompt_field: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the prompt, text or a conversation. Default: 'prompt', or a usual name for it.",
    )
    template: str | None = Field(
        default=None,
        min_length=1,
        description="Template that makes the prompt from a row's columns, such as 'Question: {prompt}\\nAnswer:'.",
    )
    where: Texts = Field(
        default=(),
        description="Keep only rows that meet all of these conditions on text, 'column=value' or 'column!=value'.",
    )
    limit: int | None = Field(default=None, ge=1, description="Maximum number of prompts taken from one source.")
    turns: Literal["last", "all"] = Field(
        default="last",
        description="Which turns of the user in a conversation are answered: each one in order, or the last.",
    )
    chat: Literal[True, False, "auto"] = Field(
        default="auto",
        description="Whether to render prompts with the target's chat template; 'auto' does so where the target has "
        "one, except for builtin:docs and builtin:code, which are texts to continue.",
    )
    chat_template: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="Jinja file that replaces the target's own chat template."
    )


class SamplingSettings(Section):
    """The sampling transform of the target, which the output distribution keeps exactly."""

    temperature: float = Field(default=0.0, ge=0, description="Temperature of the target; 0 is greedy.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Probability mass kept by nucleus sampling (top-p); 1 keeps all."
    )
    top_k: int = Field(default=0, ge=0, description="Number of most probable tokens kept (top-k); 0 keeps all.")
    max_new_tokens: int = Field(default=64, ge=1, description="Maximum number of target tokens in one completion.")


class DraftSettings(Section):
    """How many pieces are drafted, and the rule that verifies them."""

    mode: Literal["trie", "coupled", "match", "tli", "paper"] = Field(
        default="trie", description="Verification rule; all but 'paper' keep the target's distribution."
    )
    max_draft: int = Field(
        default=5, ge=0, le=64, description="Maximum number of pieces drafted per block; 0 disables speculation."
    )
    stop: Literal["cost", "never"] | Share = Field(
        default="cost",
        description="How a draft stops: at the best expected speed ('cost'), only at max_draft ('never'), or where the "
        "acceptance head's estimated probability of a rejection exceeds a number.",
    )
    costs: Literal["tracked", "estimated"] | NotNegative = Field(
        default="tracked",
        description="Source of the costs that determine what is drafted: remembered from earlier runs or estimated, "
        "and corrected by the time of every block ('tracked'), estimated from model sizes alone ('estimated'), or a "
        "number: the cost of one more drafted piece in target passes. All but 'tracked' give equal rows.",
    )
    width: int = Field(
        default=3,
        ge=1,
        le=8,
        description="Maximum number of tokens that are verified in one place, of the memory or (at temperature 0) of "
        "the drafter, where the target's pass hardly takes longer for them; 1 drafts chains.",
    )
    pause: bool = Field(
        default=True,
        description="Whether nothing is drafted where decoding without drafts is expected to be faster.",
    )
    weights: WeightFormat = Field(
        default="auto",
        description="Weight format of the drafter, as `weights`. 'int8' and 'int4' quantise it, which costs a little "
        "acceptance and is faster on most machines from tens of millions of parameters.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="Temperature of the drafter. Default: sampling.temperature."
    )
    sources: Sources = Field(
        default=("own", "memory", "model"),
        description="Sources of drafts: the sequence's own text ('own'), what the target emitted before ('memory') and "
        "the drafter ('model'). Each block uses the one that is expected to be fastest.",
    )
    exploration: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Share of the blocks that draw at random what they do: draft nothing, use the own text and the "
        "memory, or use the drafter. They tell the speed without drafts, and take about 1% of the time. `omnidraft "
        "replay` sets 1/32.",
    )


class MemorySettings(Section):
    """Drafts in target tokens: the sequence's own text, and the memory of completed texts."""

    budget_bytes: int = Field(
        default=67_108_864,
        ge=512,
        description="Memory budget of one target's completed texts in bytes.",
    )
    publish: bool = Field(
        default=True, description="Whether versions contain the memory, from which its texts can be reconstructed."
    )


class PromptSettings(Section):
    """How the models read prompts, and which of their keys and values are kept for prompts that begin alike."""

    cache_bytes: int = Field(
        default=268_435_456,
        ge=0,
        description="Memory budget of the prefix cache of one target and its drafter in bytes: keys and values of the "
        "beginnings of earlier prompts, which are copied for prompts that begin alike; 0 keeps none.",
    )
    share_tenants: bool = Field(
        default=False,
        description="Whether the prefixes of one tenant of a server (an API key) serve the others too.",
    )


class VocabularySettings(Section):
    """How special tokens of the target map to the drafter. BOS, EOS, PAD and equal names are matched automatically."""

    special: Literal["spell", "block"] = Field(
        default="block",
        description="Treatment of the target's other special tokens: spelled out in the drafter's pieces, or "
        "never drafted.",
    )


class CacheSettings(Section):
    """The n-gram cache: target tokens that are spelled by several drafter pieces."""

    policy: Literal["lru", "lfu", "unbounded", "off"] = Field(
        default="lfu",
        description="Eviction policy of the n-gram cache; 'unbounded' never evicts, 'off' disables the cache.",
    )
    budget_bytes: int = Field(default=4_194_304, ge=1, description="Memory budget of the n-gram cache in bytes.")


class LearnSettings(Section):
    """Online learning of the drafter and its acceptance head."""

    enabled: bool = Field(
        default=True, description="Whether the drafter and the head are trained while the stream runs."
    )
    loss: Literal["hybrid", "direct", "trie", "acceptance", "likelihood", "n-grams"] = Field(
        default="trie",
        description="Distillation loss, with method 'gradient'; 'likelihood' and 'n-grams' are ablations of the paper.",
    )
    method: Literal["gradient", "least-squares"] = Field(
        default="least-squares",
        description="How the drafter is trained: 'least-squares' trains only its output layer, in closed form, at a "
        "fraction of the cost of 'gradient', which trains all. Adapters (lora_rank) are trained by gradient.",
    )
    interval: int = Field(
        default=4,
        ge=1,
        description="Prompts, or 64 tokens of a longer answer, between two updates; with spacing 'paying' the minimum.",
    )
    spacing: Literal["fixed", "paying"] = Field(
        default="paying",
        description="Update interval: 'fixed', or 'paying', which lengthens it while updates cost more time than "
        "they save.",
    )
    rate: float = Field(default=1e-3, gt=0, description="Learning rate of the drafter.")
    lora_rank: int = Field(
        default=0,
        ge=0,
        description="Rank of the LoRA adapter that each target trains over one frozen drafter; 0 trains the drafter.",
    )

    @property
    def lora(self) -> bool:
        """Whether each target trains an adapter of its own."""
        return self.lora_rank > 0

    @property
    def trains_output_layer(self) -> bool:
        """Whether only the drafter's output layer is trained, in closed form."""
        return self.method == "least-squares" and not self.lora


class DriftSettings(Section):
    """Detection of drift and the response to it."""

    detector: Literal["page-hinkley", "none"] = Field(
        default="page-hinkley",
        description="Drift detector over the acceptance rate: river's Page-Hinkley test of falls, or none.",
    )
    response: Literal["reset", "recall", "none"] = Field(
        default="recall",
        description="Response to a drift: reset the head ('reset'), also restore an earlier version "
        "that scores better ('recall'), or none.",
    )


class PublishSettings(Section):
    """When versions (drafter, head and n-gram cache) are published, and where they are registered."""

    enabled: bool = Field(default=True, description="Whether versions are published to MLflow.")
    interval: int = Field(default=64, ge=1, description="Prompts between two published versions.")
    mlflow_uri: str | None = Field(
        default=None, min_length=1, description="Tracking URI of MLflow. Default: a local store next to the runs."
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the registered model in MLflow. Default: one for each pair of target and drafter.",
    )


class LogSettings(Section):
    """Content of the token log."""

    text: bool = Field(
        default=True,
        description="Whether the log contains prompts, texts and token bytes; token ids are always logged.",
    )


class CommitSettings(Section):
    """When the log is committed together with a checkpoint."""

    seconds: float = Field(
        default=1.0, gt=0, description="Seconds after which a commit is due; slow commits become rarer."
    )


class ServeSettings(Section):
    """Serving of live requests with `omnidraft serve`."""

    learn: Literal["live", "idle", "shadow", "off"] = Field(
        default="live",
        description="Online learning from requests: 'live' at any time, 'idle' only while no request runs, 'shadow' "
        "publishes versions and changes nothing in service, 'off' disables it.",
    )
    waiting: int = Field(
        default=256, ge=1, description="Maximum number of queued requests; further requests get status 429."
    )
    model_name: str | None = Field(
        default=None, min_length=1, description="Name of the target for clients; by default the one that loads it."
    )
    deadline_seconds: float = Field(
        default=300.0, gt=0, description="Time limit of a request in seconds, including its time in the queue."
    )
