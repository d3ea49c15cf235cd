"""The proof that a forward pass computes what the model computes, made when a model is loaded.

A text is read at once by the model's own modules, and by the forward pass as decoding reads it: a prompt, then several
tokens and single ones, with rollbacks, a saved and restored row, in a batch of ragged rows, one of which ends. The
logits of all tokens after the prompt must agree. Trees of tokens are checked after that: a forward pass that does not
read them is used for chains only. Windows, chunks and switches of the rotary frequencies are made so short for the
proof that the text is longer than each. Where a model does not take the shorter window from its configuration, the text
is longer than the real one.

Shapes: T tokens, V vocabulary.
"""

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stages.engine.forward_pass.attention_masks import LIBRARY
from stages.engine.forward_pass.forward import Forward, ForwardBatch, find_paths
from stages.engine.forward_pass.measurements import digest_code
from stages.engine.forward_pass.row_forward import find_rope_switch
from stages.engine.quantisation.modules import is_mapped, weight_shape

SPAN = 12  # tokens of a window or chunk during the proof
TEXT, OTHER_TEXT = 3 * SPAN + 4, SPAN + 6  # tokens of the two rows
# The longest text of a proof: a window that can be neither shortened nor passed limits the texts of the model instead.
LONGEST_TEXT = 4096 + SPAN
SPAN_NAMES = re.compile(r"window|chunk|local_attention|block_size|index_topk")
SHORTENED = ("sliding_window", "attention_chunk_size")
# A tree and its kept path: the tokens of the second branch are some places from where they would be in a text.
TREE, KEPT = (-1, 0, 1, 2, 3, 4, 5, 6, 1, 8, 8, -1, 11), (0, 1, 8, 10)
EXACT, ROUNDED = 1e-3, 0.3  # largest deviation in standard deviations of the logits, in float32 and in less
ROUNDED_IN_16_BITS = 0.02  # where only the inputs of matrices are rounded, with a scale for 32 of them
ROUNDED_IN_8_BITS = 0.5  # the same; SmolLM2-135M-Instruct from its Q4_1 file has 0.23


def find_spans(config: Any) -> dict[str, int]:
    """Return what a text configuration names that may change attention beyond some number of tokens."""
    return {
        name: value
        for name, value in vars(config).items()
        if SPAN_NAMES.search(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }


def tolerance(model: Any) -> float:
    """Return the largest deviation of a correct forward pass of this model."""
    return EXACT if model.dtype in (torch.float32, torch.float64) else ROUNDED


@torch.inference_mode()
def check_spans(model: Any) -> tuple[int, int | None]:
    """Find how long a text must be to go beyond everything that the configuration names. Returns the number of tokens
    of the text of a proof, and the longest text that the proof covers; None: any.
    """
    config = model.config.get_text_config()
    spans = find_spans(config)
    with shorten_spans(model):
        short = [name for name in SHORTENED if name in spans and _takes_shorter(model, name, spans[name])]
    spans = {name: span for name, span in spans.items() if name not in short}
    longest = (getattr(config, "max_position_embeddings", None) or 1 << 30) - SPAN
    longer = [span for span in spans.values() if TEXT <= span < longest]
    covered = [span for span in longer if span + SPAN <= min(LONGEST_TEXT, longest)]
    beyond = [span for span in longer if span not in covered]
    return min(longest, max([TEXT, *(span + SPAN for span in covered)])), min(beyond, default=None)


def _takes_shorter(model: Any, name: str, span: int) -> bool:
    """Whether the model computes something else with a shortened span than with this one."""
    config = model.config.get_text_config()
    ids = torch.tensor([_make_text(TEXT, model)], device=model.device)
    short_V = model(input_ids=ids).logits[0, -1]
    shortened = getattr(config, name)
    setattr(config, name, span)
    try:
        return not torch.equal(short_V, model(input_ids=ids).logits[0, -1])
    finally:
        setattr(config, name, shortened)


@contextmanager
def shorten_spans(model: Any) -> Iterator[None]:
    """Make windows, chunks and rotary switches of a model shorter than the text of a proof."""
    config = model.config.get_text_config()
    windows = {name: getattr(config, name) for name in SHORTENED if (getattr(config, name, None) or 0) > SPAN}
    switch, parameters = find_rope_switch(config), getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict)]
    switching = [rope for rope in kinds if switch is not None and rope.get("original_max_position_embeddings")]
    lengths = [rope["original_max_position_embeddings"] for rope in switching]
    if switching:  # the first pass computes the frequencies of longer texts, from the real length, and keeps them
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    try:
        for name in windows:
            setattr(config, name, SPAN)
        for rope in switching:
            rope["original_max_position_embeddings"] = min(2 * SPAN, rope["original_max_position_embeddings"])
        yield
    finally:
        for name, window in windows.items():
            setattr(config, name, window)
        for rope, length in zip(switching, lengths, strict=True):
            rope["original_max_position_embeddings"] = length


def _make_text(length: int, model: Any) -> list[int]:
    """Return ids that repeat rarely, the same in every process."""
    size, _ = weight_shape(model.get_input_embeddings())
    return random.Random(0).choices(range(size), k=length)


@torch.inference_mode()
def read_at_once(model: Any, tokens: Sequence[int]) -> Tensor:
    """Compute the logits of a text with the model's own modules (T, V): those of each position are of the text up to
    it.
    """
    switch = find_rope_switch(model.config.get_text_config())
    ends = [len(tokens)] if switch is None or switch >= len(tokens) else [switch, len(tokens)]
    begins = [0, *ends[:-1]]
    parts = []
    for begin, end in zip(begins, ends, strict=True):
        logits_TV = model(input_ids=torch.tensor([tokens[:end]], device=model.device), use_cache=False).logits[0]
        parts.append(logits_TV[begin:].float())
    return torch.cat(parts)


@torch.inference_mode()
def read_texts(model: Any, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[Tensor]:
    """Compute the logits of the last `wanted` tokens of each text (T, V), as `read_at_once` does.

    A pass of a model whose weights stay in a file takes seconds, whatever it reads, so it reads all texts: they are
    padded on the right, where no token before attends to. What does not attend computes equal beginnings once.
    """
    if not is_mapped(model):
        return [read_at_once(model, text)[len(text) - count :] for text, count in zip(texts, wanted, strict=True)]
    longest = max(map(len, texts))
    ids_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    beginnings = [[tuple(text[:end]) for end in range(1, len(text) + 1)] for text in texts]
    places = {each: row * longest + last for row, own in enumerate(beginnings) for last, each in enumerate(own)}
    numbers = dict(zip(places, range(len(places)), strict=True))
    rows = [[numbers[each] for each in own] for own in beginnings]
    numbers_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])

    def take(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].flatten(0, 1)[list(places.values())],)

    def spread(_: Any, inputs: tuple[Tensor], output_NO: Tensor) -> Tensor:
        return output_NO[numbers_BT]

    named, output = model.named_modules(), model.get_output_embeddings()
    apart = [
        part for name, part in named if name.endswith(".mlp") or (isinstance(part, nn.Linear) and ".mlp." not in name)
    ]
    hooks = [part.register_forward_pre_hook(take) for part in apart]
    hooks += [part.register_forward_hook(spread) for part in apart if part is not output]
    try:
        logits_NV = model(input_ids=ids_BT, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    return [logits_NV[row[len(row) - count :]] for row, count in zip(rows, wanted, strict=True)]


@torch.inference_mode()
def check_forward(
    model: Any, make: Callable[[], Forward], limit: float, length: int, *, rounds_inputs: bool = False
) -> tuple[float, bool]:
    """Compare what a forward pass computes with what the model does, in standard deviations of the logits.

    Logits that the model sets to minus infinity or to the smallest number are compared as such. The longer text has
    `length` tokens. Returns the largest difference, and whether a tree of new tokens is read with differences of at
    most `limit`. For an approximation (int8, int4, bfloat16), which `rounds_inputs`, the first is the root of the mean
    square of the differences, which does not grow with the vocabulary.
    """
    with shorten_spans(model):
        chains = _ProofReader(make(), [_make_text(length, model), _make_text(OTHER_TEXT + 5, model)[5:]])
        chains.read_as_decoding_does()
        trees = _TreeReader(make(), _make_text(length + 2 * SPAN, model), length)
        with catch_model_errors() as failures:
            trees.read_as_decoding_does()
        paths, found = zip(*trees.found, strict=True) if trees.found else ((), ())
        wanted = list(map(len, [*chains.texts, *found]))
        references = read_texts(model, [*chains.texts, *paths], wanted)
    ratios = [
        _compare(logits_V.float(), references[row][position], rounds_inputs=rounds_inputs)
        for row, position, logits_V in chains.found
    ]
    of_trees = [
        _compare(one, other, rounds_inputs=False)
        for pair in zip(found, references[len(chains.texts) :], strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    follows = bool(of_trees) and not failures and all(ratio <= limit for ratio in of_trees)  # False for NaN
    return (math.inf if any(map(math.isnan, ratios)) else max(ratios)), follows


def _compare(found_V: Tensor, expected_V: Tensor, *, rounds_inputs: bool) -> float:
    """Return the difference of the logits of one position in their standard deviations."""
    smallest = torch.finfo(torch.bfloat16).min / 2
    used_V = expected_V > smallest
    if not torch.equal(used_V, found_V > smallest):
        return math.inf
    difference_U = (found_V - expected_V)[used_V]
    size = difference_U.square().mean().sqrt() if rounds_inputs else difference_U.abs().max()
    return float(size / expected_V[used_V].std().clamp(min=1e-6))


@contextmanager
def catch_model_errors() -> Iterator[list[str]]:
    """Catch and describe errors: models raise anything for a cache, a mask or positions that they do not expect. A lack
    of memory is not their fault.
    """
    errors: list[str] = []
    try:
        yield errors
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        errors.append(": ".join([type(error).__name__, *str(error).splitlines()[:1]]))


class _ProofReader:
    """Reads two texts as decoding reads them, and keeps the logits."""

    def __init__(self, forward: Forward, texts: list[list[int]]) -> None:
        self.texts, self._forward = texts, forward
        self._lengths = [0] * len(texts)
        # row, position and logits at every position that was read for its logits
        self.found: list[tuple[int, int, Tensor]] = []

    def read_as_decoding_does(self) -> None:
        """Read the texts in parts, as ragged rows, with wrong tokens that are rolled back."""
        longest = len(self.texts[0])
        self._forward.reserve(1, longest + SPAN)
        self._pass({0: (longest // 2, 0)}, wanted=0)  # a prompt, and a longer one joins
        self._forward.reserve(2, longest + SPAN)
        self._pass({1: (4, 0)}, wanted=0)
        self._pass({0: (3, 2), 1: (1, 3)})
        self._pass({0: (1, 0), 1: (5, 1)})
        self._pass({0: (1, 4), 1: (1, 0)})
        self._forward.write_cache(0, [kept.clone() for kept in self._forward.read_cache(0, self._lengths[0])])
        self._pass({0: (4, 1), 1: (2, 0)})
        self._pass({0: (0, 0), 1: (1, 0)})
        self._forward.move(0, 1, self._lengths[0])  # the second row ends, the first takes its place
        self._forward.move(1, 0, self._lengths[0])
        self._pass({0: (longest - self._lengths[0] - 2, 3)})
        self._pass({0: (1, 0)})
        self._pass({0: (1, 0)})

    def _pass(self, reads: dict[int, tuple[int, int]], wanted: int | None = None) -> None:
        """Read right tokens and then wrong ones of some rows, keep the logits of the right ones, and roll back."""
        first, rows = min(reads), range(min(reads), max(reads) + 1)
        right = [self.texts[row][self._lengths[row] :][: reads[row][0]] for row in rows]
        wrong = [[1 + index for index in range(reads[row][1])] for row in rows]
        tokens = [[*good, *bad] for good, bad in zip(right, wrong, strict=True)]
        counts = [len(new) if wanted is None else wanted for new in tokens]
        starts = [self._lengths[row] for row in rows]
        logits_NV, _ = self._forward(ForwardBatch(first, tokens, starts, counts, hidden=wanted is None))
        begin = 0
        for row, good, count in zip(rows, right, counts, strict=True):
            for index in range(min(count, len(good))):
                self.found.append((row, self._lengths[row] + index, logits_NV[begin + index]))
            begin += count
            self._lengths[row] += len(good)


class _TreeReader:
    """Reads trees after two prompts, and keeps the logits of each path.

    A row that branches twice is read together with a chain. One path is kept, some tokens of the chain are rolled back,
    and both rows are continued, the second by a tree.
    """

    def __init__(self, forward: Forward, text: list[int], length: int) -> None:
        self._forward = forward
        self._texts = [text[: max(1, length - SPAN)], text[4 : 4 + OTHER_TEXT // 2]]
        self._unread = iter(text[length - SPAN :])
        self._length = length
        self._read: list[list[int]] = []
        self.found: list[tuple[list[int], Tensor]] = []  # texts of paths, and the logits of the tokens of each path

    def read_as_decoding_does(self) -> None:
        """Read trees and chains; nothing where the forward pass does not read trees."""
        if not self._forward.reads_trees:
            return
        self._forward.reserve(2, self._length + SPAN)
        for row, prompt in enumerate(self._texts):
            self._forward(ForwardBatch(row, [prompt], [0], wanted=[0]))
        self._read_trees(TREE, tuple(range(-1, 4)))
        self._keep(0, KEPT)
        self._keep(1, (0, 1, 2))
        self._read_trees((-1, 0), (-1, 0, -1))

    def _read_trees(self, *parents: Sequence[int]) -> None:
        """Read new tokens with these parents, per row."""
        self._read = [[next(self._unread) for _ in row_parents] for row_parents in parents]
        counts, starts = list(map(len, parents)), list(map(len, self._texts))
        logits_NV, _ = self._forward(ForwardBatch(0, self._read, starts, counts, parents=parents))
        for row, (row_parents, found_QV) in enumerate(zip(parents, logits_NV.split(counts), strict=True)):
            for token, path in enumerate(find_paths(row_parents)):
                if token not in row_parents:  # nothing follows it
                    text = [*self._texts[row], *(self._read[row][node] for node in path)]
                    self.found.append((text, found_QV[path].float()))

    def _keep(self, row: int, path: Sequence[int]) -> None:
        """Keep a path of the last tree of a row."""
        self._forward.keep(row, len(self._texts[row]), path)
        self._texts[row] += [self._read[row][token] for token in path]


def proof_key(model: Any, *parts: object) -> list[Any]:
    """Return what the outcome of a proof depends on besides the weights: configuration, device, libraries, own code."""
    buffers = hashlib.sha256()
    for buffer in model.buffers():  # weights of quantised models
        buffers.update(buffer.detach().flatten()[:64].float().cpu().numpy().tobytes())
    how = f"{model.device.type} {model.config._attn_implementation} torch {torch.__version__}"
    return [model.config.to_json_string(), how, LIBRARY, digest_code(), buffers.hexdigest(), *map(str, parts)]


def pick_forward(
    model: Any, candidates: Sequence[Callable[[], Forward]], limit: float, length: int, *, rounds_inputs: bool = False
) -> tuple[int | None, bool, list[str]]:
    """Return the number of the first candidate that computes what the model computes, whether it reads trees rightly,
    and what those before it did.
    """
    reasons: list[str] = []
    for number, make in enumerate(candidates):
        with catch_model_errors() as errors:
            deviation, follows_trees = check_forward(model, make, limit, length, rounds_inputs=rounds_inputs)
            if deviation <= limit:
                return number, follows_trees, reasons
            errors.append(f"its logits deviate by {deviation:.2g} standard deviations")
        reasons += errors
    return None, False, reasons
