"""The sections of a run's configuration: each setting with its default, its range and its meaning.

The descriptions are the only place where a setting is explained; the command line's help takes them from here.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Texts = Annotated[tuple[str, ...], Field(strict=False)]  # files hold lists where this wants tuples
Share = Annotated[float, Field(ge=0, le=1)]
SourceName = Literal["own", "memory", "model"]
Sources = Annotated[tuple[SourceName, ...], Field(strict=False)]
WeightFormat = Literal["auto", "fastest", "float32", "bfloat16", "codes", "codes8", "int8", "int4"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and values of a wrong type."""

    # Strict: `batch = "2"` and `batch = true` are mistakes, and a guess would hide them.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SourceSettings(Section):
    """How prompts are made from the rows of a source."""

    prompt_field: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the prompt. Default: 'prompt', or a usual name for it.",
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
    target_field: str = Field(
        default="target",
        min_length=1,
        description="With several targets: the column that names the target of a row. Rows without it are routed "
        "in turn.",
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

    mode: Literal["trie", "match", "tli", "paper"] = Field(
        default="trie", description="Verification rule; all but 'paper' keep the target's distribution."
    )
    max_draft: int = Field(
        default=5, ge=0, le=64, description="Maximum number of pieces drafted per block; 0 disables speculation."
    )
    adapt: bool = Field(default=True, description="Whether the acceptance head decides when a draft stops.")
    stop_rule: Literal["cost", "threshold", "never"] = Field(
        default="cost",
        description="How a draft stops: at the best expected speed ('cost'), at a fixed estimate ('threshold'), "
        "or only at max_draft ('never').",
    )
    stop_threshold: Share = Field(
        default=0.7,
        description="With stop_rule 'threshold': estimated probability of a rejection at which a draft stops.",
    )
    costs: Literal["measured", "tracked", "estimated"] = Field(
        default="tracked",
        description="Source of the costs that determine what is drafted: measured when the run begins and corrected by "
        "the time of every block ('tracked'), not corrected ('measured'), or estimated from model sizes.",
    )
    relative_cost: float | None = Field(
        default=None, ge=0, description="Cost of one more drafted piece in target passes; overrides draft.costs."
    )
    siblings: int = Field(
        default=3,
        ge=0,
        le=8,
        description="Maximum number of the drafter's next likeliest pieces that are verified next to each drafted one, "
        "at temperature 0 and where the target's pass hardly takes longer for them; 0 drafts chains.",
    )
    only_where_paying: bool = Field(
        default=True, description="Whether nothing is drafted where decoding without drafts is faster."
    )
    timed_pauses: bool = Field(
        default=True,
        description="Whether the seconds of this run's blocks pause all drafting, in addition to the costs of passes. "
        "Without it, and with costs that are not tracked, equal costs and equal seeds give equal rows.",
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
    holdout: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Share of the blocks that draw at random what they do: draft nothing, use the own text and the "
        "memory, or use the drafter. From these blocks the recipe 'policy-values' estimates the speed of each.",
    )


class MemorySettings(Section):
    """Drafts in target tokens: the sequence's own text, and the memory of completed texts."""

    budget_bytes: int = Field(
        default=67_108_864,
        ge=512,
        description="Memory budget of one target's completed texts in bytes.",
    )
    order: int = Field(default=8, ge=1, le=8, description="Maximum number of tokens of a remembered context.")
    nodes: int = Field(default=16, ge=1, le=64, description="Maximum number of candidates of a sequence per block.")
    width: int = Field(
        default=3, ge=1, le=8, description="Maximum number of candidates after one place; 1 drafts chains."
    )
    depth: int = Field(default=12, ge=1, le=64, description="Maximum number of candidates that follow each other.")
    publish: bool = Field(
        default=True, description="Whether versions contain the memory, from which its texts can be reconstructed."
    )
    decay_on_drift: bool = Field(
        default=True, description="Whether a drift halves the counts of the memory, so that new text weighs more."
    )


class PromptSettings(Section):
    """How the models read prompts, and which of their keys and values are kept for prompts that begin alike."""

    chunk: int = Field(default=128, ge=1, description="Maximum number of prompt tokens that a model reads at once.")
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
    special_names: Texts = Field(
        default=(),
        description="Exceptions to vocabulary.special as 'TARGET=DRAFTER', such as '<|eot_id|>=</s>'; DRAFTER may "
        "be 'spell' or 'block'.",
    )


class CacheSettings(Section):
    """The n-gram cache: target tokens that are spelled by several drafter pieces."""

    policy: Literal["lru", "lfu", "unbounded", "off"] = Field(
        default="lfu",
        description="Eviction policy of the n-gram cache; 'unbounded' never evicts, 'off' disables the cache.",
    )
    budget_bytes: int = Field(default=4_194_304, ge=1, description="Memory budget of the n-gram cache in bytes.")
    seed: Literal["none", "vocabulary", "text"] = Field(
        default="none",
        description="Initial content of the n-gram cache: nothing, every n-gram of the vocabularies, or those of "
        "a text.",
    )
    seed_text: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="With cache.seed 'text': text file whose most frequent n-grams fill the cache."
    )


class LearnSettings(Section):
    """Online learning of the drafter and its acceptance head."""

    enabled: bool = Field(
        default=True, description="Whether the drafter and the head are trained while the stream runs."
    )
    loss: Literal["hybrid", "direct", "trie", "acceptance", "likelihood", "n-grams"] = Field(
        default="trie",
        description="Distillation loss of the drafter; 'likelihood' and 'n-grams' are ablations of the paper.",
    )
    method: Literal["gradient", "least-squares"] = Field(
        default="gradient",
        description="How the drafter is trained: 'gradient' trains all its weights, 'least-squares' only its output "
        "layer, in closed form, at a fraction of the cost. Adapters (lora) are trained by gradient.",
    )
    target_state: bool = Field(
        default=True,
        description="Whether the drafter also reads the target's last hidden state (method 'least-squares').",
    )
    interval: int = Field(
        default=4, ge=1, description="Prompts between two updates; with spacing 'paying' the minimum."
    )
    spacing: Literal["fixed", "paying"] = Field(
        default="paying",
        description="Update interval: 'fixed', or 'paying', which lengthens it while updates cost more time than "
        "they save, or few of the drafter's tokens are rejected.",
    )
    longest_interval: int = Field(
        default=64,
        ge=1,
        description="Maximum number of prompts between two updates (spacing 'paying'); where few of the drafter's "
        "tokens are rejected, at least four times as many, and twice that after each update that is not served.",
    )
    horizon: int = Field(
        default=1000,
        ge=1,
        description="Maximum number of prompts over which an update's benefit is counted; no more than the stream has "
        "had so far (spacing 'paying').",
    )
    piece_cost: float | None = Field(
        default=None,
        ge=0,
        description="Cost of one training pass over one piece, in target passes. Default: estimated from the "
        "model sizes.",
    )
    lag: int = Field(
        default=4,
        ge=0,
        description="Prompts between the start of a background update and its application; 0 computes updates in "
        "the foreground. Adapters (lora) always use 0.",
    )
    steps: int = Field(default=2, ge=1, description="Gradient steps per drafter update.")
    rate: float = Field(default=1e-3, gt=0, description="Learning rate of the drafter.")
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay of the drafter.")
    ngram_weight: float = Field(default=0.2, ge=0, description="Weight of the n-gram term in the hybrid loss.")
    acceptance_blend: Share = Field(default=0.5, description="Share of the acceptance term in the acceptance loss.")
    teacher_top: int = Field(
        default=64, ge=1, description="Number of most probable target tokens kept per position as soft targets."
    )
    off_policy: bool = Field(
        default=False, description="Whether drafted positions after the first rejection are trained on as well."
    )
    lora: bool = Field(
        default=False, description="Whether each target trains its own LoRA adapter over one frozen drafter."
    )
    lora_rank: int = Field(default=32, ge=1, description="Rank of the LoRA adapters.")
    teacher_temperature: float | None = Field(
        default=None,
        gt=0,
        description="Temperature of the soft targets. Default: that of sampling, but at least 0.5.",
    )
    replay_prompts: int = Field(
        default=256,
        ge=0,
        description="Size of the replay buffer in prompts, a uniform sample of the stream; 0 disables replay.",
    )
    gate_share: float = Field(
        default=0.15,
        ge=0,
        lt=1,
        description="Share of the prompts held out for the gate that accepts or refuses updates.",
    )
    gate_tolerance: Share = Field(
        default=0.01, description="Largest drop in expected acceptance at which an update is still applied."
    )
    gate_window: int = Field(default=12, ge=1, description="Number of recent held-out prompts that the gate evaluates.")
    clip: float = Field(default=1.0, gt=0, description="Maximum gradient norm.")
    head_schedule: Literal["joint", "interleaved"] = Field(
        default="interleaved",
        description="When the head is trained: with every drafter update ('joint'), or also on the prompts in "
        "between, as soon as there are 32 new labels ('interleaved').",
    )
    head_rate: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate of the head. Default: 0.005, or 0.0001 for a head that came with the drafter.",
    )
    head_batch: int = Field(default=256, ge=1, description="Batch size of the head in labelled pieces.")
    head_buffer: int = Field(default=8192, ge=1, description="Size of the head's training buffer in labelled pieces.")

    @property
    def trains_output_layer(self) -> bool:
        """Whether only the drafter's output layer is trained, in closed form."""
        return self.method == "least-squares" and not self.lora


class DriftSettings(Section):
    """Detection of drift and the response to it."""

    detector: Literal["auto", "ranks", "fall", "adwin", "page-hinkley", "none"] = Field(
        default="auto",
        description="Drift detector: 'ranks' bets on ranks among the recent past and has a stated time between false "
        "alarms; 'fall' compares in standard deviations; 'adwin' and 'page-hinkley' are river's; 'none' disables "
        "detection. 'auto' is 'ranks' where the memory is a source, else 'fall'.",
    )
    alarm_interval: float = Field(
        default=10_000.0,
        ge=1,
        description="Prompts of an unchanged stream between two false alarms, at least, on average ('ranks').",
    )
    delta: float = Field(default=0.002, gt=0, lt=1, description="Probability of a false alarm (ADWIN).")
    deviations: float = Field(
        default=7.0, gt=0, description="Cumulative fall in standard deviations that raises an alarm ('fall')."
    )
    grace: int = Field(default=10, ge=1, description="Number of prompts before the first possible alarm.")
    threshold: float = Field(default=3.0, gt=0, description="Cumulative deviation that raises an alarm (Page-Hinkley).")
    tolerance: float = Field(default=0.05, ge=0, description="Deviation per prompt that is ignored (Page-Hinkley).")
    answer: Literal["reset", "recall", "none"] = Field(
        default="recall",
        description="Response to a drift: reset the head ('reset'), also restore an earlier version "
        "that scores better ('recall'), or none.",
    )
    recall_margin: Share = Field(
        default=0.02, description="Minimum gain in expected acceptance at which an earlier version is restored."
    )
    recall_versions: int = Field(
        default=12, ge=1, description="Maximum number of earlier versions scored after a drift."
    )
    cooldown: int = Field(
        default=20, ge=0, description="Number of prompts after a response during which drift is only logged."
    )
    signal: Literal["auto", "frequency", "drafted", "predicted", "learned", "judged", "first"] = Field(
        default="auto",
        description="Value of a prompt fed to the detector: how common its tokens were in earlier completions "
        "('frequency'), share of its tokens that came from drafts of any source "
        "('drafted'), share that the memory held for the likeliest, whatever drafted them ('predicted'), share drafted "
        "without copies of its own text ('learned'), acceptance rate of the model's drafts ('judged'), or only of the "
        "first token in each block ('first'). Where the memory is a source, "
        "'auto' is 'frequency' for 'ranks', and 'drafted' and 'predicted' for 'fall'; with the own text alone it is "
        "'drafted' and 'learned'.",
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
    probe: bool = Field(
        default=True, description="Whether every published version is evaluated on the fixed probe prompts."
    )


class LogSettings(Section):
    """Content of the token log."""

    text: bool = Field(
        default=True,
        description="Whether the log contains prompts, texts and token bytes; token ids are always logged.",
    )


class CommitSettings(Section):
    """When the log is committed together with a checkpoint: after `prompts` or `seconds`, whichever comes first."""

    prompts: int = Field(default=256, ge=1, description="Completed prompts after which a commit is due.")
    seconds: float = Field(default=10.0, gt=0, description="Seconds after which a commit is due.")
    share: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="Maximum share of the run's time spent on commits; slow commits become rarer.",
    )


class ServeSettings(Section):
    """Serving of live requests with `omnidraft serve`."""

    learn: Literal["live", "shadow", "off"] = Field(
        default="live",
        description="Online learning from requests: 'live' applies updates at once, 'shadow' only publishes "
        "versions, 'off' disables it.",
    )
    learn_share: float = Field(default=0.2, gt=0, description="CPU budget of the learner, as a share of one core.")
    waiting: int = Field(
        default=256, ge=1, description="Maximum number of queued requests; further requests get status 429."
    )
    max_tokens: int = Field(default=4096, ge=1, description="Maximum number of target tokens in one completion.")
    choices: int = Field(default=16, ge=1, description="Maximum number of choices (n) of one request.")
    body_bytes: int = Field(default=1 << 20, ge=1, description="Maximum size of a request body in bytes.")
    deadline_seconds: float = Field(
        default=300.0, gt=0, description="Time limit of a request in seconds, including its time in the queue."
    )
    grace_seconds: float = Field(
        default=30.0, ge=0, description="Seconds that running requests may take to finish when the server shuts down."
    )
