"""The table of architectures: models with attention in every layer and one feed-forward part.

Settings are those of tiny checkpoints: windows and chunks of 16 tokens, changes of rope at 32.
"""

from architecture_making import Architecture, alternate

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [1.0 + 1.5 * place for place in range(8)],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
SLIDING = {"sliding_window": 16, "layer_types": alternate("sliding_attention", "full_attention")}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

LLAMA_FAMILY = (
    Architecture("llama", "Llama 1 and 2, SmolLM, Yi, TinyLlama", drafts=True, seed=1),
    Architecture("llama (rope llama3)", "Llama 3.1 to 3.3", {"rope_parameters": LLAMA3}),
    Architecture("llama (rope linear)", "long-context Llama 2 and Vicuna", {"rope_parameters": LINEAR}),
    Architecture("llama (rope yarn)", "long-context versions of Llama and Qwen", {"rope_parameters": YARN}),
    Architecture(
        "llama (rope dynamic)",
        "long-context versions of Llama 2",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 96},
    ),
    Architecture(
        "llama (bias, tied)", "SmolLM2, InternLM2", {"attention_bias": True, "tie_word_embeddings": True}, seed=2
    ),
    Architecture("mistral", "Mistral 7B v0.2 and v0.3, Nemo", {"sliding_window": None}, drafts=True),
    Architecture("mistral (window)", "Mistral 7B v0.1, Zephyr", {"sliding_window": 16}, drafts=True),
    Architecture("ministral", "Ministral 8B", SLIDING),
    Architecture("ministral3", "Ministral 3"),
    Architecture("qwen2", "Qwen 1.5 to 2.5, DeepSeek-R1-Distill-Qwen", drafts=True),
    Architecture("qwen2 (window)", "Qwen2 with `use_sliding_window`", {**SLIDING, "use_sliding_window": True}),
    Architecture("qwen3", "Qwen3 0.6B to 32B", drafts=True),
    Architecture("cwm", "Code World Model", SLIDING | {"bos_token_id": 0, "eos_token_id": 261}),
    Architecture("smollm3", "SmolLM3", {"num_hidden_layers": 4}, drafts=True),
    Architecture("arcee", "AFM 4.5B", {}),
    Architecture("apertus", "Apertus 8B and 70B"),
    Architecture("seed_oss", "Seed-OSS 36B"),
    Architecture("internlm3", "InternLM3"),
    Architecture("iquestcoder", "IQuest-Coder", seed=1),
    Architecture("hyperclovax", "HyperCLOVA X SEED"),
    Architecture("jais2", "Jais 2"),
    Architecture("helium", "Helium 1"),
    Architecture("nanochat", "nanochat"),
    Architecture("bitnet", "BitNet b1.58 2B4T", seed=2),
    Architecture("diffllama", "DiffLlama"),
    Architecture("doge", "Doge 20M to 160M"),
    Architecture("ernie4_5", "ERNIE 4.5 0.3B"),
    Architecture("hunyuan_v1_dense", "Hunyuan 0.5B to 7B"),
    Architecture("stablelm", "StableLM 2, Stable Code", drafts=True, seed=1),
    Architecture("nemotron", "Nemotron 4, Minitron"),
    Architecture("hrm_text", "HRM Text"),
)

GOOGLE = (
    Architecture("gemma", "Gemma 1, CodeGemma", drafts=True, seed=1),
    Architecture("gemma2", "Gemma 2", SLIDING | {"query_pre_attn_scalar": 16}, drafts=True),
    Architecture("gemma3_text", "Gemma 3 270M to 27B", SLIDING | {"query_pre_attn_scalar": 16}, drafts=True, seed=2),
    Architecture(
        "gemma3n_text",
        "Gemma 3n E2B and E4B",
        {
            **SLIDING,
            "num_hidden_layers": 4,
            "layer_types": alternate("sliding_attention", "full_attention", layers=4),
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 262,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
        },
    ),
    Architecture(
        "gemma4_text",
        "Gemma 4 E2B and E4B",
        {
            **SLIDING,
            "num_hidden_layers": 4,
            "layer_types": alternate("sliding_attention", "full_attention", layers=4),
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "vocab_size_per_layer_input": 262,
            "hidden_size_per_layer_input": 8,
        },
        drafts=True,
    ),
    Architecture(
        "gemma4_text (experts)",
        "Gemma 4 26B A4B",
        {
            **SLIDING,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 262,
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    Architecture("gemma4_unified_text", "Gemma 4 12B", {**SLIDING, "global_head_dim": 32}),
    Architecture("vaultgemma", "VaultGemma 1B", SLIDING | {"query_pre_attn_scalar": 16}),
)

OTHERS = (
    Architecture("phi", "Phi 1, 1.5 and 2", {"partial_rotary_factor": 0.5}),
    Architecture("phi3", "Phi 3 mini 4k, Phi 4", {"sliding_window": None}, drafts=True),
    Architecture("phi3 (window)", "Phi 3 mini 4k", {"sliding_window": 16}),
    Architecture(
        "phi3 (longrope)",
        "Phi 3 and 3.5 mini 128k, Phi 4 mini",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32, "max_position_embeddings": 128},
    ),
    Architecture("glm", "GLM 4 9B (2024), GLM Edge"),
    Architecture("glm4", "GLM 4 9B and 32B (2025)", drafts=True),
    Architecture("olmo", "OLMo 1", drafts=True, seed=1),
    Architecture("olmo2", "OLMo 2", seed=1),
    Architecture("olmo3", "OLMo 3", SLIDING),
    Architecture(
        "granite",
        "Granite 3",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        drafts=True,
    ),
    Architecture("granite_swa", "Granite with windows", SLIDING),
    Architecture("exaone4", "EXAONE 4 32B and 1.2B", SLIDING),
    Architecture("cohere", "Command R and R+", drafts=True),
    Architecture("cohere2", "Command R7B and A", SLIDING, drafts=True),
    Architecture("starcoder2", "StarCoder2", {"sliding_window": None}, drafts=True),
    Architecture("starcoder2 (window)", "StarCoder2 3B and 7B", {"sliding_window": 16}),
    Architecture("minicpm3", "MiniCPM3 4B", {**MLA, "scale_emb": 2, "dim_model_base": 32}),
    Architecture("youtu", "Youtu-LLM 2B", MLA),
    Architecture("persimmon", "Persimmon 8B", seed=1),
    Architecture(
        "modernbert-decoder",
        "ModernBERT decoders, Ettin",
        {
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 260,
            "cls_token_id": 0,
            "sep_token_id": 0,
            "num_hidden_layers": 3,
            "local_attention": 32,
            "layer_types": alternate("full_attention", "sliding_attention", layers=3),
        },
    ),
)

OLDER = (
    Architecture("gpt2", "GPT-2, DistilGPT2", drafts=True),
    Architecture("openai-gpt", "GPT"),
    Architecture(
        "gpt_neo",
        "GPT-Neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
        },
        drafts=True,
    ),
    Architecture("gptj", "GPT-J 6B", {"rotary_dim": 8}),
    Architecture("codegen", "CodeGen", {"rotary_dim": 8}),
    Architecture("gpt_neox", "GPT-NeoX, Pythia", drafts=True, seed=1),
    Architecture("gpt_neox_japanese", "GPT-NeoX Japanese", {"intermediate_multiple_size": 2}, seed=2),
    Architecture("gpt_bigcode", "StarCoder, SantaCoder"),
    Architecture("opt", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, drafts=True),
    Architecture("xglm", "XGLM", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96}),
    Architecture("biogpt", "BioGPT"),
    Architecture("ctrl", "CTRL", {"dff": 96, "n_positions": 128}),
    Architecture("bloom", "BLOOM, BLOOMZ", drafts=True),
    Architecture("mpt", "MPT", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}, seed=2),
    Architecture("falcon", "Falcon 40B", {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None}),
    Architecture("falcon (multi-query)", "Falcon 7B", {"head_dim": None}, drafts=True),
    Architecture(
        "falcon (alibi)",
        "Falcon RW 1B",
        {
            "head_dim": None,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
)

DENSE = (*LLAMA_FAMILY, *GOOGLE, *OTHERS, *OLDER)
