"""The table of architectures: mixtures of experts, and attention that is sparse or compressed."""

from architecture_making import Architecture, alternate
from architecture_table import MLA, SLIDING, YARN

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# With few heads, scores of several keys are exactly zero, and which of these are kept depends on the length of a pass.
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
INKLING = {
    "layer_types": alternate("hybrid_sliding", "hybrid"),
    "sliding_window_size": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "rel_extent": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": 262,
}
GROUPS = {"n_group": 2, "topk_group": 1}

EXPERTS_EVERYWHERE = (
    Architecture("mixtral", "Mixtral 8x7B and 8x22B", EXPERTS, drafts=True),
    Architecture("qwen2_moe", "Qwen1.5 MoE, Qwen2 57B A14B", EXPERTS),
    Architecture("qwen3_moe", "Qwen3 30B A3B and 235B A22B", EXPERTS),
    Architecture(
        "llama4_text",
        "Llama 4 Scout and Maverick",
        EXPERTS
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "num_hidden_layers": 4,
            "floor_scale": 16,
            "interleave_moe_layer_step": 2,
        },
        drafts=True,
    ),
    Architecture("gpt_oss", "gpt-oss 20B and 120B", EXPERTS | SLIDING | {"rope_parameters": YARN}, drafts=True),
    Architecture("phimoe", "Phi 3.5 MoE", EXPERTS | {"sliding_window": None}),
    Architecture("olmoe", "OLMoE 1B 7B", EXPERTS),
    Architecture("flex_olmo", "FlexOlmo", EXPERTS, seed=2),
    Architecture("granitemoe", "Granite 3 1B A400M", EXPERTS),
    Architecture(
        "granitemoeshared", "Granite MoE with a shared expert", EXPERTS | {"shared_intermediate_size": 32}, seed=1
    ),
    Architecture("granitemoe_swa", "Granite MoE with windows", EXPERTS | SLIDING),
    Architecture(
        "ernie4_5_moe",
        "ERNIE 4.5 21B A3B and 300B A47B",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    Architecture("hunyuan_v1_moe", "Hunyuan A13B", {"num_experts": 4, "moe_topk": 2}),
    Architecture("hy_v3", "Hunyuan 3", EXPERTS, seed=1),
    Architecture("minimax_m2", "MiniMax M2", EXPERTS),
    Architecture(
        "jetmoe",
        "JetMoE 8B",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "kv_channels": 16,
            "num_key_value_heads": 2,
        },
    ),
    Architecture(
        "dbrx",
        "DBRX",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        },
    ),
    Architecture(
        "aria_text", "Aria", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 32}
    ),
    Architecture("cohere2_moe", "Command A MoE", EXPERTS | SLIDING | {"num_shared_experts": 1}),
    Architecture("exaone_moe", "K-EXAONE", EXPERTS | SLIDING | {"num_shared_experts": 1, "first_k_dense_replace": 1}),
    Architecture("afmoe", "Trinity", EXPERTS | SLIDING | {"num_dense_layers": 1, "num_shared_experts": 1}),
    Architecture(
        "mimo_v2_flash",
        "MiMo V2 Flash",
        EXPERTS
        | SLIDING
        | {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 16,
        },
    ),
    Architecture("laguna", "Laguna", EXPERTS | SLIDING),
    Architecture("mellum", "Mellum 2", EXPERTS | SLIDING),
    Architecture("solar_open", "Solar Open", ROUTED),
    Architecture("dots1", "dots.llm1", ROUTED | SLIDING),
    Architecture("glm4_moe", "GLM 4.5 to 4.7", ROUTED, drafts=True),
    Architecture("flint", "Flint", EXPERTS | SLIDING),
    Architecture("kolibri1", "Kolibri 1", EXPERTS | SLIDING),
    Architecture("inkling_text", "Inkling", INKLING | {"n_shared_experts": 1, "logits_mup_width_multiplier": 2.0}),
    Architecture("inkling2_text", "Inkling 2", INKLING | {"n_layers_per_attn_res_block": 1}),
    Architecture(
        "zaya",
        "ZAYA1",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "router_hidden_size": 16,
        },
    ),
)

LATENT = (
    Architecture("deepseek_v2", "DeepSeek V2, V2 Lite, Coder V2", ROUTED | MLA),
    Architecture("deepseek_v3", "DeepSeek V3, R1, V3.1, Kimi K2", ROUTED | MLA | GROUPS, drafts=True),
    Architecture("glm4_moe_lite", "GLM 4.7 Flash", ROUTED | MLA),
    Architecture(
        "longcat_flash",
        "LongCat Flash",
        MLA
        | {
            "num_layers": 2,
            "num_hidden_layers": None,
            "ffn_hidden_size": 96,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 32,
        },
    ),
    Architecture("axk1", "A.X K1", ROUTED | MLA | GROUPS),
)

SPARSE = (
    Architecture("deepseek_v32", "DeepSeek V3.2", ROUTED | MLA | GROUPS | INDEX),
    Architecture("glm_moe_dsa", "GLM 5", ROUTED | MLA | INDEX),
    Architecture("axk2", "A.X K2", ROUTED | MLA | INDEX | {"gated_norm_rank": 4}),
    Architecture("dots3_note_text", "dots 3", ROUTED | MLA | INDEX | {"shared_experts_intermediate_size": 32}, seed=1),
    Architecture("hy_v4", "Hunyuan 4", ROUTED | MLA | INDEX),
    Architecture(
        "minimax_m3_vl_text",
        "MiniMax M3",
        EXPERTS
        | {
            "num_hidden_layers": 2,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    Architecture(
        "deepseek_v4",
        "DeepSeek V4",
        {
            "num_hidden_layers": 2,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe"],
            "num_key_value_heads": 1,
            "q_lora_rank": 24,
            "sliding_window": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "num_nextn_predict_layers": 0,
            "hc_mult": 2,
            **INDEX,
        },
    ),
)

MIXTURES = (*EXPERTS_EVERYWHERE, *LATENT, *SPARSE)
