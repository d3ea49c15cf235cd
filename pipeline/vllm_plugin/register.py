"""Lets vLLM's second model runner take the plugin, which `--speculative-config` names as `custom_class`.

An entry point of the group `vllm.general_plugins`: vLLM calls it in each of its processes, with or without drafts of
omnidraft, so it must be light and never fail. The second runner has an interface for speculators without a model
(`BaseSpeculator`), but chooses among vLLM's own only, and its configuration refuses `custom_class`. Both functions are
replaced here, and do what they did for every other configuration. Where they are not as expected, nothing is replaced:
vLLM then takes the first runner.
"""

from typing import Any

from pipeline.vllm_plugin.versions import is_supported

PROPOSER = "pipeline.vllm_plugin.proposer.OmnidraftProposer"
METHOD = "custom_class"
WRAPPED = "knows_omnidraft"


def register() -> None:
    """Replace what keeps the plugin out of the second runner. May be called again."""
    try:
        import vllm
        import vllm.v1.worker.gpu.spec_decode as speculators
        from vllm.config import VllmConfig

        find, choose = VllmConfig._get_v2_model_runner_unsupported_features, speculators.init_speculator
    except (ImportError, AttributeError):
        return
    if not is_supported(vllm.__version__) or hasattr(choose, WRAPPED):
        return

    def find_unsupported(self: Any) -> list[str]:
        found: list[str] = find(self)
        if not is_ours(self.speculative_config):
            return found
        if self.scheduler_config.async_scheduling is None:  # not decided yet; see OmnidraftSpeculator
            self.scheduler_config.async_scheduling = False
        return [one for one in found if METHOD not in one]

    def choose_speculator(vllm_config: Any, *given: Any) -> Any:
        if not is_ours(vllm_config.speculative_config):
            return choose(vllm_config, *given)
        from pipeline.vllm_plugin.speculator import build_speculator

        return build_speculator(vllm_config, *given)

    setattr(choose_speculator, WRAPPED, True)
    VllmConfig._get_v2_model_runner_unsupported_features = find_unsupported
    speculators.init_speculator = choose_speculator


def is_ours(speculative: Any) -> bool:
    """Return whether a speculative configuration, or None, names the plugin."""
    return speculative is not None and speculative.method == METHOD and str(speculative.model) == PROPOSER
