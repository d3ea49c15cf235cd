"""The table of architectures, measured: each runs exactly, or is refused when it is loaded, with the reason.

python tests/support/architectures.py [NAME...]   measures and prints a line for each, or for those named
python tests/support/architectures.py --write     measures all and writes the table of docs/models.md
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from traceback import extract_tb
from typing import Any

import torch
from architecture_hybrids import HYBRIDS
from architecture_making import Architecture, make_tokenizer, save_checkpoint
from architecture_mixtures import MIXTURES
from architecture_table import DENSE
from torch import Tensor
from transformers import AutoModelForCausalLM
from typing_extensions import override

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import Models, load_models
from pipeline.config.settings import Config
from stages.engine.forward_pass.measurements import Measurements
from store.errors import ModelError
from store.events import Event, Outcome, PromptReceived, TokenDecision

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = """| model type | models | forward pass |
|---|---|---|
"""  # of the table at the end of the page
ARCHITECTURES = {one.name: one for one in (*DENSE, *MIXTURES, *HYBRIDS)}
NEW_TOKENS = 24
TEXTS = (  # of 12, 22, 43 and 64 tokens: some cross the window of 16 or the change of rope at 32, some begin beyond
    "Ann had five",
    "3 apples and 5 eggs cost",
    "In the end, who of us has the most marbles?",
    "A train leaves at noon with 40 people; at each stop 6 get in, 9 ou",
)
ALONE = (0,)  # prompts that are also run alone: the text crosses 16 and 32 tokens
CLOSEST = 1e-4  # gap of the two best logits, in standard deviations, that rounding cannot close
DRAFTER_NOISE = 0.35  # of the drafter's output layer, in its standard deviations: about half of its pieces are accepted


@dataclass(frozen=True)
class Measured:
    """The result of one line."""

    outcome: str  # `exact`, `refused`, `wrong`, `crash`, or `unfit` for a checkpoint that shows nothing
    reason: str = ""  # of anything but exact
    forward: str = ""  # how the target was computed
    accepted: int = 0  # pieces of the drafter, of those that were judged
    judged: int = 0
    seconds: float = 0.0  # CPU time of all

    def __str__(self) -> str:
        drafted = f"{self.forward}, {self.accepted}/{self.judged} accepted" if self.forward else ""
        return f"{self.outcome:8}{self.seconds:6.2f}s  {drafted:32}{self.reason}"


@dataclass(frozen=True)
class Reference:
    """The output of `generate` of `transformers` for a prompt, and the smallest gap of its two best logits."""

    tokens: list[int]
    closest: float


class FreshProofs(Measurements):
    """Proofs are made at every load, so that a proof that changes the model is found."""

    @override
    def get_or_measure(self, kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
        return measure() if kind == "proof" else super().get_or_measure(kind, key, measure)


def generate_references(folder: Path) -> list[Reference]:
    """Greedy texts by `transformers` alone, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [_generate(model, text) for text in TEXTS]


@torch.no_grad()
def _generate(model: Any, text: str) -> Reference:
    ids_1T = torch.tensor([make_tokenizer().encode(text)])
    found = model.generate(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Reference(found.sequences[0, ids_1T.shape[1] :].tolist(), _closest(torch.cat(found.logits)))


def _closest(logits_TV: Tensor) -> float:
    best_T2 = logits_TV.topk(2).values
    return float(((best_T2[:, 0] - best_T2[:, 1]) / logits_TV.std(-1)).min())


def fitness_error(references: Sequence[Reference]) -> str:
    """Why texts are unfit: two logits tie within rounding, or the text repeats itself. Empty if they are fit."""
    closest = min(one.closest for one in references)
    if closest < CLOSEST:
        return f"the two best logits are {closest:.1e} standard deviations apart: change the seed"
    distinct = [len(set(one.tokens)) for one in references]
    if min(distinct) < 5:
        return f"texts have {distinct} distinct tokens: change the seed"
    return ""


def config_of(folder: Path, **changes: Any) -> Config:
    """Settings of a run of a checkpoint that drafts for itself; every block is drafted, and not all is accepted."""
    fixed = {
        "targets": (str(folder),),
        "drafter": str(folder),
        "device": "cpu",
        "publish.enabled": False,
        "sampling.max_new_tokens": NEW_TOKENS,
        "draft.pause": False,
        "draft.costs": "estimated",
        "draft.stop": "never",
        "draft.max_draft": 3,
        "draft.sources": ("model",),
        "learn.enabled": False,
    }
    return Config().with_overrides({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


@torch.no_grad()
def _disturb_drafter(models: Models) -> None:
    """Add noise to the drafter's output layer, so that some of its pieces are rejected."""
    weight = models.drafter.model.get_output_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    weight += noise * weight.std() * DRAFTER_NOISE
    models.drafter.forward_pass.refresh()


def run_prompts(config: Config, models: Models, folder: Path, which: Sequence[int]) -> list[Event]:
    """All events of a run over some of the prompts."""
    loop = build_loop(config, [models], folder)  # no registry: nothing is published
    return list(loop.run(PromptReceived(n, f"p{n}", "texts", n + 1, TEXTS[n]) for n in which))


def compare_texts(events: Sequence[Event], references: Sequence[Reference], which: Sequence[int]) -> Iterator[str]:
    """Describe every prompt whose text is not the reference."""
    for offset in which:
        tokens = [
            event.emitted_id
            for event in events
            if isinstance(event, TokenDecision) and event.offset == offset and event.emitted_id is not None
        ]
        expected = references[offset].tokens
        if tokens != expected:
            places = (place for place, (own, other) in enumerate(zip(tokens, expected, strict=False)) if own != other)
            first = next(places, min(len(tokens), len(expected)))
            yield f"prompt {offset} differs from token {first} of {len(expected)}"


def measure_checkpoint(folder: Path) -> Measured:
    """Load a checkpoint as target and drafter, and compare its texts with those of `transformers`."""
    references = generate_references(folder)
    if error := fitness_error(references):
        return Measured("unfit", error)
    config = config_of(folder)
    try:
        (models,) = load_models(config, "", folder, FreshProofs())
    except ModelError as error:
        return Measured("refused", str(error).replace(str(folder), "FOLDER"))
    name = models.target.forward_pass.name
    own = next((kind for kind in ("compiled", "packed") if name.startswith(kind)), "")
    forward = own or name.replace("modules of transformers", "modules")
    _disturb_drafter(models)
    errors, outcomes = [], Counter[Outcome]()
    for batch, which in ((1, ALONE), (len(TEXTS), range(len(TEXTS)))):
        events = run_prompts(config.with_overrides({"batch": batch}), models, folder, which)
        errors += [f"batch {batch}: {error}" for error in compare_texts(events, references, which)]
        outcomes.update(event.outcome for event in events if isinstance(event, TokenDecision))
    accepted = outcomes[Outcome.ACCEPTED]
    judged = accepted + outcomes[Outcome.REJECTED]
    if not errors and not 0 < accepted < judged:
        errors = ["some pieces must be accepted and some rejected"]
    return Measured("wrong" if errors else "exact", "; ".join(errors), forward, accepted, judged)


def measure(architecture: Architecture, folder: Path) -> Measured:
    """Make a checkpoint below a folder and measure it; any error but a refusal is a crash."""
    began, place = process_time(), folder / architecture.name
    try:
        save_checkpoint(architecture, place)
        measured = measure_checkpoint(place)
    except Exception as error:
        last = extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        measured = Measured("crash", f"{type(error).__name__}: {str(error)[:200]} ({where})")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    seconds = process_time() - began
    return Measured(**{**vars(measured), "seconds": seconds, "reason": " ".join(measured.reason.split())})


def line_of(architecture: Architecture, measured: Measured) -> str:
    result = f"refused: {measured.reason}" if measured.outcome == "refused" else measured.forward
    kind, _, variant = architecture.name.partition(" ")
    name = " ".join(filter(None, (f"`{kind}`", variant)))
    return f"| {name} | {architecture.models} | {result} |"


def lines_of_page() -> list[str]:
    """The lines of the table in `docs/models.md`, without its head."""
    return PAGE.read_text(encoding="utf-8").partition(HEAD)[2].splitlines()


def print_table(names: Sequence[str]) -> dict[str, Measured]:
    """Measure and print lines of the table."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = measure(ARCHITECTURES[name], Path(folder))
            print(f"{name:30}{found[name]}", flush=True)
    counts = Counter(one.outcome for one in found.values())
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    return found


def write_page(found: dict[str, Measured]) -> None:
    """Write the table at the end of `docs/models.md`."""
    introduction = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    lines = "\n".join(line_of(ARCHITECTURES[name], measured) for name, measured in found.items())
    PAGE.write_text(f"{introduction}{HEAD}{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    rewrite = sys.argv[1:] == ["--write"]
    parts = [] if rewrite else sys.argv[1:]
    measured_lines = print_table([name for name in ARCHITECTURES if not parts or any(part in name for part in parts)])
    if rewrite:
        write_page(measured_lines)
