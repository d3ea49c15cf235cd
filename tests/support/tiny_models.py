"""Models of any architecture with few random weights."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EAGER = {"gemma2", "gpt_oss", "gpt_neo", "bloom", "mamba", "recurrent_gemma"}  # torch does not attend for them


def make_module(kind: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of a type whose matrices are large enough for every token of the context to matter."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **options})
    attention = "eager" if kind in EAGER else "sdpa"
    module: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.7 / weight.shape[-1] ** 0.5)
    return module


def make_disturbed(config: PretrainedConfig) -> Any:
    """A model whose norms and biases are random too."""
    torch.manual_seed(0)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if "norm" in name or "bias" in name else 0.05))
    return model
