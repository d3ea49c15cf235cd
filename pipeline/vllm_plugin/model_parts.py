"""The parts of an engine with a drafter model, which is loaded into the engine's process."""

from pathlib import Path

from pipeline.assembly.cache import make_cache
from pipeline.assembly.models import DrafterModels, load_drafter_models
from pipeline.assembly.stages import CHUNK, make_decode, make_head, make_sampling_params, make_teacher
from pipeline.config.settings import Config
from pipeline.vllm_plugin.engine import DraftingParts, EngineFacts
from stages.contract.blocks import SequenceState, TopLogits
from stages.drafting.costs import CostModel
from stages.drafting.head import AcceptanceHead
from stages.learn.examples.teacher import TrieTeacher
from stages.learn.examples.top_distributions import TopDistributions
from stages.ngrams.trie import build_direct_trie
from stages.prompts.prefix_cache import PrefixCache
from stages.prompts.prompt_reader import PromptReader
from stages.translate import Translate
from stages.verification.judge import Judge, Supervise
from stages.verification.rules import MODES
from stages.vocabulary.chat import DrafterEncoder


def load_parts(
    config: Config, facts: EngineFacts, costs: CostModel, uri: str, fetched: Path
) -> tuple[DrafterModels, AcceptanceHead, DraftingParts]:
    """Load the drafter and build the stages that use it."""
    models = load_drafter_models(config, uri, fetched, decodes=True)
    head = make_head(models, config.seed)
    mode, pair = MODES[config.draft.mode], models.pair
    trie = build_direct_trie(pair.pieces, len(pair.pieces), models.drafter.vocabulary_size, models.drafter.device)
    decode = make_decode(
        config.draft,
        make_sampling_params(config.sampling),
        models,
        head,
        costs,
        trie,
        usable=head.came_trained or config.learn.enabled,
        trees=False,  # vLLM verifies chains
    )
    if models.drafter.forward_pass.cuts_rows:
        prefixes = PrefixCache(config.prompts.cache_bytes, CHUNK) if config.prompts.cache_bytes else None
        decode.reader = PromptReader(models.drafter, CHUNK, prefixes, text=lambda row: row.pieces)
    teacher = make_teacher(models, config.sampling.temperature)
    judge = Judge(
        facts.ends,
        pair.context,
        mode.make_rule(trie, pair.pieces),
        _supervise_by(teacher) if config.learn.enabled else None,
    )
    cache = make_cache(config.cache, mode, models, trie)
    translate = Translate(trie, cache, pair.pieces, mode.parse)
    translate.selection = decode.selection
    encoder = DrafterEncoder(models.target_vocabulary, models.drafter_vocabulary, models.pair)

    def spell(tokens: list[int]) -> list[int]:
        return models.clip_prompt(encoder.encode_tokens(tokens))

    return models, head, DraftingParts(decode, translate, judge, spell, teacher.temperature)


def _supervise_by(teacher: TrieTeacher) -> Supervise:
    def supervise(row: SequenceState, emitted: tuple[int, ...], top: TopDistributions) -> TopLogits:
        lines = top.select(0, len(emitted))
        return teacher.keep(len(row.pieces), emitted, lines.ids_NK, lines.logits_NK, lines.sums_N1)

    return supervise
