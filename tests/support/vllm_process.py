"""Complete prompts with vLLM on the CPU. Run by the interpreter of an environment that has vLLM; JSON in, JSON out.

Input: `model`, `prompts` (token ids), `batch`, `tokens` per completion, and `drafts`, whether the plugin drafts.
Output: `texts` (token ids), `drafted` and `accepted` (tokens of drafts).
"""

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    given: dict[str, Any] = json.load(sys.stdin)
    proposer = {
        "method": "custom_class",
        "model": "pipeline.vllm_plugin.proposer.OmnidraftProposer",
        "num_speculative_tokens": 6,
    }
    engine = LLM(
        given["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=given["batch"],
        max_num_batched_tokens=512,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=proposer if given["drafts"] else None,
    )
    sampling = SamplingParams(temperature=0, max_tokens=given["tokens"])
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in given["prompts"]]
    completed = engine.generate(prompts, sampling, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    answer = {
        "texts": [list(one.outputs[0].token_ids) for one in completed],
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    }
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
