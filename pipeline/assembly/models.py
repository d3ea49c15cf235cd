"""Loading: models and tokenizers by name, and each target's vocabulary paired with the drafter's."""

import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from pipeline.config.sections import PublishSettings
from pipeline.config.settings import Config
from pipeline.models.catalog import resolve_name
from stages.drafting.target_states import STATES_FILE, TargetStates
from stages.engine.checkpoints.gguf_file import forget_headers
from stages.engine.checkpoints.size_check import estimate_memory, require_memory
from stages.engine.compiled.lines.warm_up import compile_lines
from stages.engine.compiled.shape import COMPILED_TYPES
from stages.engine.forward_pass.measurements import Measurements
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.slot_forward import SlotForward
from stages.engine.models.adapters import ADAPTER_FOLDER, adapter_name, add_adapter, load_adapter, merge_lora
from stages.engine.models.devices import pick_device, set_threads
from stages.engine.models.huggingface import load_tokenizer
from stages.engine.models.language_model import LanguageModel, fingerprint, load_model
from stages.engine.quantisation.modules import QUANTISED_BITS, is_mapped
from stages.learn.training.closed_form import untie_output
from stages.memory.search_calls import compile_search
from stages.vocabulary.pair import Pair, pair
from stages.vocabulary.template_process import TEMPLATES
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError
from store.registry.registered_version import Reference, check_model_name
from store.registry.registry import default_uri, fetch_version, resolve_number
from store.registry.version_folder import MANIFEST, open_version

# Matrices of smaller targets do not divide: one thread is as fast on an idle machine, several times faster on a busy
# one, and equal seeds then give equal decisions whatever the load.
ONE_THREAD_BELOW = 50_000_000

# For so long another thread, such as the one that writes to MLflow, may hold the interpreter when a pass of a model has
# ended. By Python's default, 5 milliseconds, that often took longer than the pass.
SWITCH_SECONDS = 0.0005


FULL_BYTES = 4  # of a weight in full precision


@dataclass(frozen=True)
class DrafterModels:
    """The drafter for one target, which need not be there itself. Several targets share the drafter's modules."""

    name: str  # the target's, as configured
    drafter: LanguageModel
    target_vocabulary: Vocabulary
    drafter_vocabulary: Vocabulary
    drafter_tokenizer: Any
    drafter_folder: Path | None  # where the drafter's head and n-grams may lie
    pair: Pair

    def clip_prompt(self, pieces: list[int]) -> list[int]:
        """Return the pieces that the drafter reads of a prompt. The context of a small drafter is often shorter than
        its target's. Half of it is left to the completion: of a longer prompt the end is read, without as many quarters
        of the context as necessary. So prompts that begin alike are cut alike and share keys and values.
        """
        quarter = max(1, self.drafter.max_length // 4)
        surplus = max(0, len(pieces) - 2 * quarter)
        return pieces[-(-surplus // quarter) * quarter :]


@dataclass(frozen=True)
class Models(DrafterModels):
    """One target with the drafter: models and vocabularies, as loaded."""

    target: LanguageModel

    @property
    def eos_ids(self) -> frozenset[int]:
        """The target's ids that end a sequence: those that its model names, or else its vocabulary's."""
        return frozenset(self.target.eos_ids or {token for token in (self.target_vocabulary.eos,) if token is not None})


def fingerprints(models: Models) -> tuple[str, str, str]:
    """Return digests that identify the target, the drafter and the pair of vocabularies, whatever their names. Call
    it before anything is learned."""
    return fingerprint(models.target), fingerprint(models.drafter), models.pair.digest


def locate(name: str, uri: str, fetched: Path) -> str:
    """The hub name or folder of a model: `builtin:NAME`, a pulled model's name, `models:/NAME/VERSION`, or what was
    given."""
    if name.startswith("models:/"):
        folder = fetched / re.sub(r"[^\w.-]+", "_", name.removeprefix("models:/"))
        shutil.rmtree(folder, ignore_errors=True)  # an alias may have moved
        return str(fetch_version(name, uri, folder))
    if (Path(name) / MANIFEST).is_file():  # a version's folder: nothing of it is loaded that was changed
        open_version(Path(name))
    return resolve_name(name)


def pin_version(name: str, uri: str) -> str:
    """The name of one version for good: an alias may move while a run lasts. Other names are what they are."""
    reference = Reference.parse(name) if name.startswith("models:/") else None
    if reference is None or reference.alias is None:
        return name
    return f"models:/{reference.name}/{resolve_number(uri, reference.name, reference.alias)}"


def settle_settings(config: Config, uri: str, *, resume: bool = False) -> Config:
    """The settings of a run: its name in MLflow is checked, and its drafter is one version for good if it is new."""
    if config.publish.enabled and config.publish.name:
        check_model_name(config.publish.name)
    return config if resume else config.model_copy(update={"drafter": pin_version(config.drafter, uri)})


def load_drafter(config: Config, source: str, device: str, measurements: Measurements | None = None) -> LanguageModel:
    """Load a drafter with the adapter that it was saved with merged, unless each target is to have one of its own.

    Its rows are still to be required, once the threads of the run are set.
    """
    learn, folder = config.learn, Path(source)
    trained = _trains_body(config, source)
    drafter = load_model(source, config.dtype, device, config.draft.weights, measurements, trained=trained)
    if (folder / ADAPTER_FOLDER).is_dir() and not learn.lora:
        merge_lora(drafter.model, str(folder / ADAPTER_FOLDER))
    # A server that learns no more may serve what was learned before.
    corrected = learn.trains_output_layer and (learn.enabled or config.serve.learn == "off")
    if corrected:
        untie_output(drafter.model)
        drafter.trains_output = drafter.model.dtype.itemsize == FULL_BYTES  # of others a copy is trained as a whole
    # The weights of the targets' states are used if they are trained, or if nothing is trained and there are some.
    if corrected or (not learn.enabled and (folder / STATES_FILE).is_file()):
        targets = config.router.targets
        drafter.extra = TargetStates(targets, drafter.vocabulary_size, drafter.device)
        drafter.extra.load(folder)
    return drafter


def _trains_body(config: Config, source: str) -> bool:
    """Whether weights of the drafter below its output layer change: they are trained, or an adapter is merged."""
    learn = config.learn
    return learn.lora or (learn.enabled and not learn.trains_output_layer) or (Path(source) / ADAPTER_FOLDER).is_dir()


def load_models(
    config: Config, uri: str, fetched: Path, measurements: Measurements | None = None
) -> tuple[Models, ...]:
    """Load the drafter and every target once, in the order in which they are named, swapped-in ones included. What
    comes from the registry `uri`, which has the `models:/` names, is copied below `fetched`. By default it is
    remembered on this machine what is fastest here, and what passes cost.
    """
    device = pick_device(config.device)
    quantised = {config.weights, config.draft.weights} & {"int8", "int4", "codes", "codes8"}
    if device != "cpu" and quantised:
        raise ConfigError(
            f"weights in {min(quantised)} are for the CPU alone, but the device is {device}; try dtype = 'bfloat16'"
        )
    sys.setswitchinterval(SWITCH_SECONDS)
    searches = config.draft.max_draft > 0 and not {"own", "memory"}.isdisjoint(config.draft.sources)
    compiling = Thread(target=_compile, args=(searches,), name="compiler")
    compiling.start()
    if config.source.chat is not False:
        TEMPLATES.calls.start()  # it loads what it needs while models are loaded
    source = locate(config.drafter, uri, fetched)
    names = config.router.targets
    sources = {name: locate(name, uri, fetched) for name in names}
    if device == "cpu":
        mapped = () if config.weights in QUANTISED_BITS else COMPILED_TYPES
        needs = {name: estimate_memory(found, config.dtype, mapped=mapped) for name, found in sources.items()}
        drafter_need = estimate_memory(source, config.dtype, trained=_trains_body(config, source))
        require_memory({config.drafter: drafter_need, **needs})
    drafter = load_drafter(config, source, device, measurements)
    targets = {
        name: load_model(
            found, config.dtype, device, config.weights, measurements, batch_invariant=config.batch_invariant
        )
        for name, found in sources.items()
    }
    largest = max(target.parameters for target in targets.values())
    if config.threads or largest < ONE_THREAD_BELOW:
        set_threads(config.threads or 1)
    with ThreadPoolExecutor(1) as loader:
        tokenizers = {found: loader.submit(load_tokenizer, found) for found in (source, *sources.values())}
        compiling.join()  # what follows is timed
        for model in sorted((drafter, *targets.values()), key=lambda one: not is_mapped(one.model)):
            if not is_mapped(model.model):
                wait(tokenizers.values())
            model.prove_forward()  # and, with the threads of the run, see which kernels are fast
            if model is not drafter:
                model.prepare_output()
    forget_headers()
    pair_with = _make_pairing(config, source, drafter, lambda found: tokenizers[found].result())
    return tuple(Models(**vars(pair_with(name, sources[name])), target=target) for name, target in targets.items())


def _compile(searches: bool) -> None:
    """Compile what is called between two passes, which takes some seconds on the first start of a release."""
    compile_lines()
    if searches:
        compile_search()


def _make_pairing(
    config: Config, source: str, drafter: LanguageModel, load: Callable[[str], Any] = load_tokenizer
) -> Callable[[str, str], DrafterModels]:
    """Return a function that pairs a loaded drafter with a target, given the target's name and where it is.

    The drafter for a target shares the drafter's weights, but has sequences of its own and, with `learn.lora_rank`, an
    adapter, with the weights that the drafter came with.
    """
    tokenizer, folder = load(source), Path(source) if Path(source).is_dir() else None
    vocabulary = Vocabulary(tokenizer, config.drafter)

    def add_own_adapter(target: str) -> str:
        name = adapter_name(target)
        add_adapter(drafter.model, name, config.learn.lora_rank, config.seed)
        if folder and (folder / ADAPTER_FOLDER).is_dir():
            load_adapter(drafter.model, name, folder / ADAPTER_FOLDER)
        return name

    def pair_with(name: str, target_source: str) -> DrafterModels:
        target_vocabulary = Vocabulary(load(target_source), name)
        own = drafter.share_weights(add_own_adapter(name) if config.learn.lora else None)
        paired = pair(target_vocabulary, vocabulary, config.vocabulary.special)
        return DrafterModels(name, own, target_vocabulary, vocabulary, tokenizer, folder, paired)

    return pair_with


def registry_uri(publish: PublishSettings) -> str:
    """The configured MLflow store, or else that of the runs in this folder."""
    return publish.mlflow_uri or default_uri(Path("runs"))


def load_vocabulary(name: str, publish: PublishSettings, fetched: Path) -> Vocabulary:
    """The vocabulary of one model, without its weights. Raises ModelError."""
    return Vocabulary(load_tokenizer(locate(name, registry_uri(publish), fetched)), name)


def load_only_target(config: Config, fetched: Path) -> Models:
    """The models of a configuration with one target; see `load_models`."""
    (models,) = load_models(config, registry_uri(config.publish), fetched)
    return models


def load_drafter_models(config: Config, uri: str, fetched: Path, *, decodes: bool = False) -> DrafterModels:
    """Load the drafter for the only target, of which only the tokenizer is loaded.

    Arguments and errors as `load_models`; `decodes`: whether the drafter drafts here, or is only trained.
    """
    source = locate(config.drafter, uri, fetched)
    (name,) = config.router.targets
    drafter = load_drafter(config, source, pick_device(config.device))
    drafter.prove_forward()
    if not decodes and not config.learn.trains_output_layer and isinstance(drafter.forward_pass, SlotForward):
        drafter.forward_pass = ModuleForward(drafter.model)
    return _make_pairing(config, source, drafter)(name, locate(name, uri, fetched))
