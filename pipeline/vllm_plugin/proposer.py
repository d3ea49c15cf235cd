"""The proposer class that vLLM loads: `--speculative-config '{"method": "custom_class", "model": PATH_OF_CLASS, ...}'`.

The only module that knows vLLM, in whose process it is imported. vLLM makes one object per worker and calls `propose`
after each pass, on the thread of the worker.

Shapes: R rows of the batch, M tokens of the longest text.
"""

import logging
import re
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.vllm_plugin.drafter import EngineDrafter
from pipeline.vllm_plugin.sequences import EngineRow
from pipeline.vllm_plugin.settings import read_settings
from store.errors import UsageError
from store.events import Event

LOG = logging.getLogger("omnidraft.vllm")

TESTED, NOT_TESTED = (0, 32), (0, 33)  # from the first version on, before the second one


def check_version(version: str) -> None:
    """Refuse a version of vLLM that the plugin was not tested with: the interface of proposers changes without notice.

    >>> check_version("0.32.0+cpu")
    >>> check_version("0.33")
    Traceback (most recent call last):
    store.errors.UsageError: The plugin is tested with vLLM 0.32 up to, not including, 0.33; got 0.33: install another.

    Raises:
        UsageError: it is none of the tested ones.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not TESTED <= (int(numbers[1]), int(numbers[2])) < NOT_TESTED:
        first, after = ("{}.{}".format(*one) for one in (TESTED, NOT_TESTED))
        raise UsageError(
            f"The plugin is tested with vLLM {first} up to, not including, {after}; got {version}: install another."
        )


class OmnidraftProposer:
    """Drafts of the memory for vLLM.

    An error of the drafter never ends the engine: it is logged once, and nothing is drafted from then on.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UsageError: the version of vLLM is not a tested one.
        ConfigError: the settings are refused (see `read_settings`).
    """

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        check_version(vllm.__version__)
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        self._drafter: EngineDrafter | None = None
        if vllm_config.device_config.device_type == "cpu":
            LOG.warning(
                "on vLLM's CPU backend, text at temperature above 0 has not the target's distribution when anything is "
                "drafted (vLLM issue 55005); send greedy requests only"
            )
        # vLLM takes the drafts of the first tensor-parallel rank alone.
        if parallel.rank % parallel.tensor_parallel_size == 0:
            self._drafter = EngineDrafter(
                read_settings(),
                most=vllm_config.speculative_config.num_speculative_tokens,
                longest=model.max_model_len,
                ends=find_ends(model),
                target=model.model,
                clock=perf_counter,
                emit=self._take,
            )

    def load_model(self, target: Any) -> None:
        """Load nothing: the memory needs no model. vLLM calls it once with the target's module."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft per row after a pass.

        Args:
            sampled_token_ids: per row the tokens that the pass emitted; none where it read a part of a prompt.
            num_tokens_no_spec: number of tokens of each row's text (R or more,).
            token_ids_cpu: the texts, the emitted tokens included (R or more, M).
            slot_mappings: not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is None:
            return drafts
        places = [place for place, sampled in enumerate(sampled_token_ids) if sampled]
        rows = [
            EngineRow(token_ids_cpu[place, : num_tokens_no_spec[place]], len(sampled_token_ids[place]))
            for place in places
        ]
        try:
            found = self._drafter.step(rows, only_decoded=len(places) == len(drafts))
        except Exception:
            LOG.exception("omnidraft failed and drafts nothing from now on; the texts of the engine are not affected")
            self._drafter = None
            return drafts
        for place, draft in zip(places, found, strict=True):
            drafts[place] = draft
        return drafts

    def _take(self, event: Event) -> None:
        """Log an event as a detail."""
        LOG.debug("%s", event)


def find_ends(model_config: Any) -> set[int]:
    """Return the ids that end a sequence, from the model's configuration and its generation configuration."""
    found = (
        getattr(model_config.hf_text_config, "eos_token_id", None),
        model_config.try_get_generation_config().get("eos_token_id"),
    )
    ids = [one if isinstance(one, list) else [one] for one in found]
    return {token for group in ids for token in group if token is not None}
