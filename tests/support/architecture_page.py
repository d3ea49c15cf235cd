"""The fixed text of docs/models.md, which `architectures.py` fills and writes."""

FORWARDS = {  # how a model is computed, as its forward pass is called
    "compiled": "own forward pass, compiled for the processor when the model is loaded (Llama, Mistral, Qwen; float32 "
    "on a CPU, heads of a multiple of 16 numbers, sizes of a multiple of 32)",
    "packed": "own forward pass with packed weights (Llama, Mistral, Qwen)",
    "modules": "modules of `transformers`, with the mask and the key-value cache of this project",
    "modules, row by row": "one sequence after the other, each with the cache of `transformers`; "
    "a rejected draft returns to a copy of the state",
    "modules, row by row and token by token": "the same, one token per pass",
    "modules, row by row, each pass from the beginning of the text": "no cache is used",
}
HEAD = """| model type | models | forward pass | result |
|---|---|---|---|"""
INTRODUCTION = """# Models

<!-- written by tests/support/architectures.py --write -->

Every Hugging Face causal language model is tried when it is loaded: it runs exactly or is refused,
with the reason ([exactness.md](exactness.md#the-check-at-load)). The logits of a text computed at
once are compared with the logits of the same text computed in parts, with rejected drafts and with
several sequences of different lengths. The text is longer than the windows, chunks and changes of
rotary frequencies that the configuration names. The fastest forward pass that gives the same logits
is used.

The table below is a test: `tests/exactness/test_architectures.py`. Each line is a tiny checkpoint
with random weights of one architecture of `transformers`. It has 2 to 4 layers of width 64, windows
and chunks of 16 tokens, and changes of rotary frequencies at 32 tokens.

The checkpoint is the target and, with noise on its output layer, the drafter, so that about half of
the drafted pieces are rejected. Four prompts of 12 to 64 tokens are continued greedily by
{new_tokens} tokens in float32, in a batch of four, and the first one also alone. *Exact* means that
every token is the one that `generate` of `transformers` emits. No two best logits are so close that
rounding decides.

The table has {total} lines of {types} model types: {exact} exact, {refused} refused, none different.
The models of the second column are examples; their own weights were not tested here.

| forward pass | what is computed | lines |
|---|---|---|
{forwards}

Not in the table: decoders of encoder-decoder models, encoders with a causal head (BERT and its
relatives), models of speech, music and images, and byte models with patches (BLT). The text part of
a multimodal model is the line of its text type, such as `gemma3_text` for Gemma 3.

Three limits:

- A model with dynamic rope continues a text up to `max_position_embeddings`. Beyond it, the
  frequencies would change with every token.
- `transformers` clamps small time steps of the Mamba layers of Nemotron-H and Zamba2 in passes over
  several tokens, but not in passes over one. A checkpoint that has such time steps is computed from
  the beginning of the text in each pass, and equals `generate(use_cache=False)`.
- Sparse attention (DeepSeek V3.2, GLM 5) keeps the best keys of an index. If several keys have the
  same score, the choice of `transformers` depends on the length of the pass, and the checkpoint is
  refused. That happens with an index of few heads.
"""
