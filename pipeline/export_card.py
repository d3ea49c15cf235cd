"""The model card of an exported drafter: Markdown with the metadata that the Hugging Face hub reads."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.cli_registry import printable
from store.version_folder import Manifest
from store.versions import VersionDetails

ENGINES = """
### transformers

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target_name, drafter_name = "{model}", "{folder}"
target, words = AutoModelForCausalLM.from_pretrained(target_name), AutoTokenizer.from_pretrained(target_name)
drafter, pieces = AutoModelForCausalLM.from_pretrained(drafter_name), AutoTokenizer.from_pretrained(drafter_name)
prompt = words("The history of the city begins with", return_tensors="pt")
text = target.generate(
    **prompt, do_sample=False, max_new_tokens=64,
    assistant_model=drafter, tokenizer=words, assistant_tokenizer=pieces,
)
print(words.decode(text[0]))
```

Leave out the last two arguments where target and drafter have one vocabulary. Greedy text is the target's own.

### vLLM

```bash
vllm serve {model} --speculative-config '{{"method": "draft_model", "model": "{folder}",
  "num_speculative_tokens": {length}, "use_heterogeneous_vocab": true}}'
```

Leave out `use_heterogeneous_vocab` where target and drafter have one vocabulary.

### llama.cpp

Only for a target with the drafter's own vocabulary:

```bash
python convert_hf_to_gguf.py {folder} --outfile drafter.gguf
llama-server -m target.gguf -md drafter.gguf
```

### omnidraft

```bash
omnidraft replay --target {target} --drafter models:/{name}/{number}
```
"""


# What may stand in code that people copy: nothing that ends a text in quotes, begins an option or speaks to a shell.
NAME = r"\w[\w.-]*"
HUB = rf"{NAME}(/{NAME})?"
TARGET = r"(builtin:|models:/)?[\w./@][\w./@-]*"

PROBE = (
    "`probe/acceptance` is the share of the target's greedy tokens, on prompts that never change, that the drafter "
    "foretells. An engine with one vocabulary for both accepts about that share of the tokens that it judges; one that "
    "translates between two by re-tokenising text accepts less."
)


@dataclass(frozen=True)
class Card:
    """What a card tells.

    Attributes:
        details: all that the registry knows of the version.
        lineage: numbers from the version back to its floor.
        folder: its name.
        length: pieces of a draft.
        parameters: of the drafter.
        licence: of the drafter that it began as; None if its card names none.
    """

    details: VersionDetails
    lineage: Sequence[int]
    folder: str
    length: int
    parameters: int
    licence: str | None

    def text(self) -> str:
        """The whole card. Texts from the registry stand in code or tables, each on one line."""
        details, manifest = self.details, self.details.manifest
        number, name = details.summary.number, manifest["name"]
        target = manifest["target"]
        engines = ENGINES.format(
            model=target if re.fullmatch(HUB, target) else "TARGET",
            target=target if re.fullmatch(TARGET, target) else "TARGET",
            folder=self.folder if re.fullmatch(NAME, self.folder) else "DRAFTER",
            length=self.length,
            name=name if re.fullmatch(NAME, name) else "NAME",
            number=number,
        )
        return "\n".join(
            [
                *self._metadata(),
                f"# {_safe(name)}, version {number}",
                "",
                f"A drafter for speculative decoding with the target `{_safe(target)}`, taught by omnidraft "
                "while a stream of prompts ran. It proposes tokens; the target decides, so that text keeps the "
                "target's law.",
                "",
                *_table("figure", "value", self._figures()),
                *([PROBE, ""] if "probe/acceptance" in self.details.metrics else []),
                *_table("origin", "", self._origin(manifest)),
                "`omnidraft/` holds what other engines do not read: `ngrams.parquet` (target tokens that are spelt by "
                "several of the drafter's pieces: `pieces`, `token`, `count`), `head.safetensors` (the head that ends "
                "drafts) and `manifest.json` (the sha256 of the version's files).",
                "",
                "## Use",
                engines,
            ]
        )

    def _metadata(self) -> list[str]:
        licence = [f"license: {json.dumps(_safe(self.licence))}"] if self.licence else []
        tags = ["tags:", "- speculative-decoding", "- draft-model", "- omnidraft"]
        return ["---", "library_name: transformers", "pipeline_tag: text-generation", *licence, *tags, "---", ""]

    def _figures(self) -> list[tuple[str, str]]:
        metrics = self.details.metrics
        known = [(name, f"{metrics[name]:.4g}") for name in sorted(metrics)]
        return [*known, ("parameters", f"{self.parameters:,}")]

    def _origin(self, manifest: Manifest) -> list[tuple[str, str]]:
        summary, params = self.details.summary, self.details.params
        told: Mapping[str, object] = {
            "run": manifest["run"],
            "stream offset": manifest["offset"],
            "learned from the prompts": self.details.tags.get("learned"),
            "answers the drift at": self.details.tags.get("drift"),
            "published because of": summary.reason,
            "published at": manifest["created_at"],
            "began as": manifest["drafter"],
            "loss": params.get("loss"),
            "temperature": params.get("temperature"),
            "lineage": " from ".join(map(str, self.lineage)),
            "datasets": self.details.tags.get("datasets"),
            "licence of the drafter": self.licence or "not named by its card",
            "digest": manifest["digest"],
        }
        return [(name, str(value)) for name, value in told.items() if value not in (None, "")]


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {first} | {second} |", "|---|---|", *(f"| {_safe(a)} | {_safe(b)} |" for a, b in rows), ""]


def _safe(text: str) -> str:
    """One printable line that ends no cell and no code."""
    return printable(text).replace("|", "\\|").replace("`", "'")
