"""The table of architectures: recurrent models, and those that mix recurrent layers or convolutions with attention."""

from architecture_making import Architecture, alternate
from architecture_mixtures import EXPERTS, ROUTED
from architecture_table import MLA

LINEAR_ATTENTION = {
    "layer_types": alternate("linear_attention", "full_attention"),
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
}
DELTA = {"linear_head_dim": 16, "linear_num_heads": 4, "layer_types": alternate("linear_attention", "full_attention")}

RECURRENT = (
    Architecture("mamba", "Mamba 130M to 2.8B", {"state_size": 8}, drafts=True),
    Architecture(
        "mamba2",
        "Mamba 2, Codestral Mamba",
        {
            "num_heads": 4,
            "head_dim": 32,
            "expand": 2,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
        drafts=True,
    ),
    Architecture("falcon_mamba", "Falcon Mamba 7B", {"state_size": 8}),
    Architecture("rwkv", "RWKV 4", {"context_length": 128, "attention_hidden_size": 64}),
    Architecture("xlstm", "xLSTM 7B", {"num_heads": 4, "head_dim": None, "chunk_size": 16, "qk_dim_factor": 1.0}),
    Architecture(
        "recurrent_gemma",
        "RecurrentGemma, Griffin",
        {
            "num_hidden_layers": 3,
            "attention_window_size": 16,
            "lru_width": 64,
            "num_key_value_heads": 1,
        },
    ),
)

HYBRID = (
    Architecture("qwen3_next", "Qwen3-Next 80B A3B", EXPERTS | LINEAR_ATTENTION, drafts=True),
    Architecture("qwen3_5_text", "Qwen3.5 0.8B to 27B", LINEAR_ATTENTION, drafts=True),
    Architecture("qwen3_5_moe_text", "Qwen3.5 35B A3B to 397B A17B", EXPERTS | LINEAR_ATTENTION),
    Architecture(
        "qwen4_exp_text",
        "Qwen4 preview",
        EXPERTS
        | LINEAR_ATTENTION
        | {
            "eos_token_id": 260,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1],
            "ple_embed_dim": 16,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 97,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
        },
    ),
    Architecture(
        "olmo_hybrid",
        "OLMo Hybrid",
        {
            "layer_types": alternate("linear_attention", "full_attention"),
            "num_key_value_heads": 4,
        },
    ),
    Architecture(
        "jamba",
        "Jamba 1.5 and 1.7",
        EXPERTS
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        seed=1,
    ),
    Architecture("bamba", "Bamba 9B", MAMBA | {"attn_layer_indices": [1]}),
    Architecture(
        "granitemoehybrid",
        "Granite 4 H",
        EXPERTS
        | MAMBA
        | {
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
        },
        drafts=True,
    ),
    Architecture(
        "granitemoehybrid (attention)",
        "Granite 4 Micro",
        EXPERTS
        | {
            "shared_intermediate_size": 32,
            "layer_types": ["attention", "attention"],
        },
    ),
    Architecture("falcon_h1", "Falcon H1", MAMBA | {"key_multiplier": 0.7}),
    Architecture(
        "nemotron_h",
        "Nemotron H, Nemotron 3 Nano",
        ROUTED
        | {
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "num_hidden_layers": 4,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
            "use_mamba_kernels": False,
        },
    ),
    Architecture(
        "zamba",
        "Zamba 7B",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "attention_hidden_size": 128,
            "head_dim": None,
            "attention_head_dim": 32,
            "num_key_value_heads": 4,
        },
    ),
    Architecture(
        "zamba2",
        "Zamba2 1.2B to 7B",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "use_mamba_kernels": False,
            "chunk_size": 16,
            "head_dim": None,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    Architecture("lfm2", "LFM2 350M to 2.6B", {"layer_types": ["conv", "full_attention"]}, drafts=True),
    Architecture(
        "lfm2_moe",
        "LFM2 8B A1B",
        EXPERTS
        | {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
        },
    ),
    Architecture(
        "lfm3",
        "LFM3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
    ),
    Architecture(
        "minimax",
        "MiniMax 01, M1",
        EXPERTS
        | {
            "layer_types": alternate("linear_attention", "full_attention"),
            "block_size": 16,
        },
    ),
    Architecture("kimi_linear", "Kimi Linear 48B A3B", ROUTED | MLA | DELTA | {"num_local_experts": 4}),
    Architecture("bailing_hybrid", "Ring and Ling 2.5", ROUTED | MLA | DELTA | {"num_local_experts": 4}, seed=1),
)

HYBRIDS = (*RECURRENT, *HYBRID)
