"""Loading: models and tokenizers by name, and each target's vocabulary paired with the drafter's."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import zoo
from pipeline.config import Config
from pipeline.dealing import Dealing
from stages.adapters import ADAPTER_FOLDER, adapter_name, add_adapter, load_adapter, merge_saved_adapter
from stages.forward import ModuleForward
from stages.huggingface import load_tokenizer, pick_device, set_threads
from stages.language_model import LanguageModel, load_model
from stages.pair import Pair, SpecialRule, pair
from stages.vocabulary import Vocabulary
from store.errors import ConfigError, ModelError
from store.registry import fetch_version, list_versions
from store.version_folder import MANIFEST, open_version
from store.versions import Reference, numbered

# Matrices of smaller targets do not divide: one thread is as fast in quiet, several times faster beside other work,
# and equal seeds then give equal decisions whatever the load.
ONE_THREAD_BELOW = 50_000_000


@dataclass(frozen=True)
class DrafterModels:
    """The drafter for one target, which need not be there itself. Several targets share the drafter's modules."""

    name: str  # the target's, as configured
    drafter: LanguageModel
    target_words: Vocabulary
    drafter_words: Vocabulary
    drafter_tokenizer: Any
    drafter_folder: Path | None  # where the drafter's head and n-grams may lie
    pair: Pair


@dataclass(frozen=True)
class Models(DrafterModels):
    """One target with the drafter: models and vocabularies, as loaded."""

    target: LanguageModel


def locate(name: str, uri: str, fetched: Path) -> str:
    """The hub name or folder behind a model's name: `builtin:NAME`, `models:/NAME/VERSION`, or what was given."""
    if name.startswith("builtin:"):
        return str(zoo.path_of(name.removeprefix("builtin:")))
    if name.startswith("models:/"):
        folder = fetched / re.sub(r"[^\w.-]+", "_", name.removeprefix("models:/"))
        shutil.rmtree(folder, ignore_errors=True)  # an alias may have moved
        return str(fetch_version(name, uri, folder))
    if (Path(name) / MANIFEST).is_file():  # a version's folder: nothing of it is loaded that was changed
        open_version(Path(name))
    return name


def pinned(name: str, uri: str) -> str:
    """The name of one version for good: an alias may move while a run goes on. Other names are what they are.

    Raises:
        ModelError: no version has the alias.
    """
    reference = Reference.parse(name) if name.startswith("models:/") else None
    if reference is None or reference.alias is None:
        return name
    versions = list_versions(uri, reference.name)
    number = numbered(reference.alias, versions)
    if number is None:
        known = ", ".join(sorted({alias for version in versions for alias in version.aliases})) or "none"
        raise ModelError(f"{reference.name} must have a version with the alias {reference.alias!r}, but has {known}")
    return f"models:/{reference.name}/{number}"


def load_drafter(config: Config, source: str, device: str) -> LanguageModel:
    """A drafter with the adapter that it was saved with merged, unless each target is to have one of its own.

    Its rows are still to be required, once the threads of the run are set.

    Raises:
        ModelError: see `load_model`.
    """
    drafter = load_model(source, config.dtype, device, config.draft.weights)
    if (Path(source) / ADAPTER_FOLDER).is_dir() and not config.learn.lora:
        merge_saved_adapter(drafter.model, Path(source) / ADAPTER_FOLDER)
    return drafter


def pair_of(config: Config, target_words: Vocabulary, words: Vocabulary) -> Pair:
    """Both vocabularies paired by the settings.

    Raises:
        VocabularyError: they cannot be.
        ConfigError: an exception for a special token cannot be read.
    """
    return pair(target_words, words, SpecialRule.of(config.vocabulary.special, config.vocabulary.special_names))


def load_models(config: Config, uri: str, fetched: Path) -> tuple[Models, ...]:
    """Load the drafter and every target once, in the order in which they are named, swapped-in ones included.

    Args:
        config: names and types.
        uri: of the registry for `models:/` names.
        fetched: what comes from the registry is copied below it.

    Raises:
        ModelError, VocabularyError: see there.
        ConfigError: a swap or an exception for a special token cannot be read, or int8 weights are wanted of a device
            that does not multiply them row by row.
    """
    device = pick_device(config.device)
    if device != "cpu" and "int8" in (config.weights, config.draft.weights):
        raise ConfigError(f"weights in int8 are for the CPU alone, but the device is {device}; try dtype = 'bfloat16'")
    source = locate(config.drafter, uri, fetched)
    folder = Path(source) if Path(source).is_dir() else None
    drafter = load_drafter(config, source, device)
    sources = {name: locate(name, uri, fetched) for name in Dealing.of(config).targets}
    targets = {name: load_model(found, config.dtype, device, config.weights) for name, found in sources.items()}
    largest = max(target.parameters for target in targets.values())
    if config.threads or largest < ONE_THREAD_BELOW:
        set_threads(config.threads or 1)
    for model in (drafter, *targets.values()):
        model.require_rows()  # and, with the threads of the run, see which kernels are fast
    tokenizer = load_tokenizer(source)
    words = Vocabulary(tokenizer, config.drafter)

    def with_target(name: str, target: LanguageModel) -> Models:
        """One target beside the shared drafter, whose rows there are its own and, with `--lora`, its adapter too."""
        target_words = Vocabulary(load_tokenizer(sources[name]), name)
        own = drafter.beside(_adapter(config, drafter, name, folder))
        words_of_both = pair_of(config, target_words, words)
        return Models(name, own, target_words, words, tokenizer, folder, words_of_both, target)

    return tuple(with_target(name, target) for name, target in targets.items())


def load_drafter_models(config: Config, uri: str, fetched: Path) -> DrafterModels:
    """The drafter to be taught for the only target, of which the tokenizer alone is loaded.

    Arguments and errors as `load_models`.
    """
    source, (name,) = locate(config.drafter, uri, fetched), Dealing.of(config).targets
    folder = Path(source) if Path(source).is_dir() else None
    drafter = load_drafter(config, source, pick_device(config.device))
    tokenizer = load_tokenizer(source)
    words = Vocabulary(tokenizer, config.drafter)
    target_words = Vocabulary(load_tokenizer(locate(name, uri, fetched)), name)
    drafter.forward_pass = ModuleForward(drafter.model)  # nothing is decoded here
    own = drafter.beside(_adapter(config, drafter, name, folder))
    return DrafterModels(name, own, target_words, words, tokenizer, folder, pair_of(config, target_words, words))


def _adapter(config: Config, drafter: LanguageModel, target: str, folder: Path | None) -> str | None:
    """Inject the target's adapter if it is to have one, with the weights that the drafter came with."""
    if not config.learn.lora:
        return None
    name = adapter_name(target)
    add_adapter(drafter.model, name, config.learn.lora_rank, config.seed)
    if folder and (folder / ADAPTER_FOLDER).is_dir():
        load_adapter(drafter.model, name, folder / ADAPTER_FOLDER)
    return name
