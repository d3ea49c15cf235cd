"""A causal language model over rows of unequal length, with its own key-value cache.

Shapes: B rows, Q new tokens of the longest row, K keys, V vocabulary, W hidden width.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.contract.blocks import SequenceState
from stages.contract.snapshot import State
from stages.engine.compiled.llama_forward import CompiledLlamaForward
from stages.engine.compiled.llama_weights import CompiledLlamaWeights, fits_compiled_forward, has_compiled_forward
from stages.engine.forward_pass.forward import Forward, ForwardBatch, is_chain
from stages.engine.forward_pass.measurements import Measurements, digest_code, digest_file
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_weights import PackedLlamaWeights
from stages.engine.forward_pass.proof import proof_key
from stages.engine.forward_pass.slot_forward import SlotForward
from stages.engine.models.adapters import (
    ADAPTER_FOLDER,
    activate,
    is_adapter_weight,
    read_adapter,
    save_adapter,
    strip_adapters,
)
from stages.engine.models.forward_choice import (
    PACKED,
    ForwardSearch,
    can_pack,
    choose_weights,
    make_forward,
    pack_weights,
)
from stages.engine.models.huggingface import load_causal_model, raise_write_errors
from stages.engine.quantisation.modules import (
    QUANTISED_BITS,
    ROUNDING,
    count_weights,
    drop_groups,
    find_stored,
    has_groups,
    is_mapped,
    iterate_weights,
    read_state,
    weight_shape,
)
from stages.engine.quantisation.stored import StoredMatrix
from store.errors import ModelError

StateReader = Callable[[Sequence[int]], Tensor]

LOG = logging.getLogger("omnidraft.models")
SAMPLES = 64  # values of each weight that enter a fingerprint
PRUNE_BELOW = 0.75  # share of the output layer's rows below which a pruned layer saves more than the scatter costs


@dataclass
class _WeightChanges:
    """How often trained weights were replaced; of all instances that share them."""

    count: int = 0
    trained: bool = False  # whether they may differ from those as loaded


class LanguageModel:
    """A causal language model over rows of unequal length, with its own key-value cache.

    Several instances may share the same modules, each with its own rows and optionally its own adapter.

    Args:
        model: any Hugging Face causal language model.
        name, adapter: for messages, and of the injected adapter to compute with.
        weights: format of the packed weights; `auto` is chosen by `choose_weights`.
        measurements: store of proofs; by default that of this machine.
        batch_invariant: whether a token must have the same bits whatever else a pass computes.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        adapter: str | None = None,
        *,
        weights: str = "fastest",
        measurements: Measurements | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.model, self.name, self.adapter = model.eval(), name, adapter
        self.device: torch.device = next(model.parameters()).device
        self.vocabulary_size, self.hidden_size = weight_shape(model.get_output_embeddings())
        self.max_length: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.parameters = count_weights(model)
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.weights = choose_weights(model) if weights == "auto" else weights
        self.batch_invariant = batch_invariant
        self._packed_weights: PackedLlamaWeights | None = None
        self.measurements = measurements or Measurements()
        self.extra: nn.Module | None = None  # trained with the model, but no part of it
        self.trains_output = False  # whether of the model only the output layer is trained
        self.reads_trees = False  # whether new tokens of a row may be a tree: where `prove_forward` found it right
        self._changes = _WeightChanges()
        self._order: list[SequenceState] = []
        self._lengths: dict[SequenceState, int] = {}

    @cached_property
    def forward_pass(self) -> Forward:
        """The packed forward if it supports the architecture, else the modules; `prove_forward` may choose another."""
        return make_forward(self._pack()) if self._can_pack() else ModuleForward(self.model)

    def _can_pack(self) -> bool:
        return not self.adapter and can_pack(self.model)

    def _pack(self) -> PackedLlamaWeights:
        if self._packed_weights is None:
            self._packed_weights = pack_weights(self.model, self.weights, batch_invariant=self.batch_invariant)
            self._packed_weights.trained = self._changes.trained
        return self._packed_weights

    def share_weights(self, adapter: str | None = None) -> "LanguageModel":
        """Return another instance over the same weights, with its own rows."""
        forward, shared = self.forward_pass, copy.copy(self)
        shared._order, shared._lengths = [], {}
        if adapter:
            shared.adapter, shared._packed_weights, shared._changes = adapter, None, _WeightChanges()
        if adapter and isinstance(forward, SlotForward):  # which computes without it
            shared.forward_pass, shared.reads_trees = ModuleForward(self.model), False
        else:
            shared.forward_pass = forward.share()
        return shared

    def admit(self, row: SequenceState, tokens: Sequence[int], *, read: bool = True) -> None:
        """Add a sequence and compute all of its tokens but the last; without `read`, none of them."""
        self._order.append(row)
        self._lengths[row] = 0
        self.forward_pass.reserve(len(self._order), len(tokens) + row.remaining_tokens)
        if read and len(tokens) > 1:
            self.extend(row, tokens[:-1])

    def extend(self, row: SequenceState, tokens: Sequence[int]) -> None:
        """Compute the next tokens of one sequence in a pass without outputs."""
        self._read([row], ForwardBatch(self._order.index(row), [tokens], [self._lengths[row]], wanted=[0]))

    def read_row(self, row: SequenceState) -> list[Tensor]:
        """Return views of the keys and values of a sequence; they change with the next pass."""
        return self.forward_pass.read_cache(self._order.index(row), self._lengths[row])

    @torch.inference_mode()
    def write_row(self, row: SequenceState, start: int, kept: Sequence[Tensor]) -> None:
        """Write keys and values of the tokens from `start` on, cut from what `read_row` returned for equal ones."""
        self.forward_pass.write_cache(self._order.index(row), kept, start)
        self._lengths[row] = start + kept[0].shape[-2]

    @torch.inference_mode()  # the cache's tensors are made in it
    def release(self, row: SequenceState) -> None:
        """Remove a sequence; the last row of the cache moves to its index."""
        index = self._order.index(row)
        last = self._order.pop()
        if last is not row:
            self.forward_pass.move(len(self._order), index, self._lengths[last])
            self._order[index] = last
        del self._lengths[row]

    def mask_without(self, allowed: Collection[int]) -> Tensor:
        """Return a mask that is True for every output that is not among the allowed ids (V,)."""
        forbidden_V = torch.ones(self.vocabulary_size, dtype=torch.bool, device=self.device)
        forbidden_V[torch.tensor(sorted(allowed), dtype=torch.long, device=self.device)] = False
        return forbidden_V

    def prove_forward(self) -> None:
        """Choose the fastest forward pass that provably computes what the model does (`ForwardSearch`).

        The outcome is stored on this machine for these weights, this configuration and this code. Raises `ModelError`
        if no forward pass is right, or the compiled one is needed and is not; `MemoryError` or `torch.OutOfMemoryError`
        if there is too little memory for a forward pass.
        """
        pack = self._pack if self._can_pack() else None
        search = ForwardSearch(self.model, self.name, self.weights, pack, batch_invariant=self.batch_invariant)
        key = proof_key(self.model, fingerprint(self), self.weights, self.batch_invariant, *search.candidates)
        proof = self.measurements.get_or_measure("proof", key, search.prove)
        if proof["longest"] and proof["longest"] < self.max_length:
            LOG.warning(
                "%s: texts end at %d tokens: its configuration names that span, and no longer text was checked",
                self.name,
                proof["longest"],
            )
            self.max_length = proof["longest"]
        self.reads_trees = proof["trees"]
        if proof["forward"] != PACKED:
            self._packed_weights = None
            self.forward_pass = search.candidates[proof["forward"]]()
        elif pack:
            pack()  # also where the proof is known: a display shows what is loaded until here

    def prepare_output(self) -> None:
        """Pack the output layer now, not in the first pass."""
        if isinstance(self.forward_pass, SlotForward):
            self.forward_pass.find_output_layer()

    def restrict(self, ids: Collection[int]) -> None:
        """Allow logits of these ids only; the others are not computed if that is faster."""
        if isinstance(self.forward_pass, SlotForward):
            self.forward_pass.restrict(sorted(ids) if len(ids) < PRUNE_BELOW * self.vocabulary_size else None)

    def state_dict(self, rows: Collection[SequenceState]) -> State:
        """Return the caches of these of its rows: keys and values bit for bit."""
        cached = [
            (row, self._lengths[row], self.forward_pass.read_cache(index, self._lengths[row]))
            for index, row in enumerate(self._order)
            if row in rows
        ]
        return {"capacity": self.forward_pass.capacity, "rows": cached}

    def load_state_dict(self, state: State) -> None:
        self._order = [row for row, _, _ in state["rows"]]
        self._lengths = {row: length for row, length, _ in state["rows"]}
        if self._order:
            self.forward_pass.reserve(len(self._order), state["capacity"])
        for index, (_, _, tensors) in enumerate(state["rows"]):
            self.forward_pass.write_cache(index, [tensor.to(self.device) for tensor in tensors])

    def length(self, row: SequenceState) -> int:
        return self._lengths[row]

    def roll_back(self, row: SequenceState, length: int) -> None:
        """Drop the cached tokens of a sequence after the first `length`."""
        self._lengths[row] = min(length, self._lengths[row])

    def keep_path(self, row: SequenceState, start: int, path: Sequence[int]) -> None:
        """Keep one path of the tree that the last forward pass read after the first `start` tokens of a sequence, see
        `Forward.keep`. Raises `ValueError` if the indices do not ascend, or are not among the new tokens.
        """
        new = self._lengths[row] - start
        if any(token <= before for before, token in pairwise((-1, *path, new))):
            raise ValueError(f"a path must ascend among the {new} new tokens, got {list(path)}")
        if path and path[-1] != len(path) - 1:
            with torch.inference_mode():  # the cache's tensors are made in it
                self.forward_pass.keep(self._order.index(row), start, path)
        self._lengths[row] = start + len(path)

    def forward(
        self,
        rows: Sequence[SequenceState],
        tokens: Sequence[Sequence[int]],
        wanted: Sequence[int],
        *,
        hidden: bool = False,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute new tokens of every admitted sequence, in order of admission. Returns logits and hidden states as of
        `Forward`. Raises `ValueError` for other rows, parents that do not fit the tokens, or a tree where the model
        reads chains only. `rows` are all admitted sequences, the other arguments as of `ForwardBatch`; `keep_path`
        keeps one path of a tree.
        """
        if list(rows) != self._order:
            raise ValueError("rows must be all admitted rows in the order of admission")
        if parents is not None:
            self._check_parents(tokens, parents)
        starts = [self._lengths[row] for row in rows]
        return self._read(rows, ForwardBatch(0, tokens, starts, wanted, hidden, parents))

    def _check_parents(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        if list(map(len, parents)) != list(map(len, tokens)):
            raise ValueError(f"every new token needs a parent, got {parents} for {list(map(len, tokens))} tokens")
        if not all(-1 <= parent < token for row_parents in parents for token, parent in enumerate(row_parents)):
            raise ValueError(f"a new token must follow an earlier one, or the cached ones (-1), got {parents}")
        if not self.reads_trees and not all(map(is_chain, parents)):
            raise ValueError(f"{self.name} ({self.forward_pass.name}) reads chains only, got the parents {parents}")

    @torch.inference_mode()
    def _read(self, rows: Sequence[SequenceState], batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        self._activate()
        for row, count in zip(rows, batch.counts, strict=True):
            self._lengths[row] += count
        self.forward_pass.reserve(len(self._order), batch.seen)
        return self.forward_pass(batch)

    @torch.no_grad()
    def load_weights(self, weights: Sequence[Tensor], *, trained: bool = True) -> None:
        """Copy values into the trained weights; they take effect in the next pass. `trained`: whether they may differ
        from those as loaded.
        """
        for current, new in zip(self.trained_weights, weights, strict=True):
            current.copy_(new)
        self._changes.count, self._changes.trained = self._changes.count + 1, trained
        if self._packed_weights:
            self._packed_weights.trained = trained
        self.forward_pass.refresh(layers=not self.trains_output)

    @property
    def weight_changes(self) -> int:
        """How often the trained weights were replaced. Keys and values are of the weights that computed them."""
        return self._changes.count

    @property
    def trained_weights(self) -> list[Tensor]:
        """The weights that training changes, always in the same order: those of the adapter or of the output layer, or
        all, and the extra ones.
        """
        trained = [weight for name, weight in self.model.named_parameters() if self.is_trained(name)]
        return [*trained, *self.extra.parameters()] if self.extra else trained

    def is_trained(self, weight: str) -> bool:
        """Whether a weight of the model is trained, by its name."""
        if self.adapter:
            return is_adapter_weight(weight, self.adapter)
        module, _, name = weight.rpartition(".")
        outputs = self.model.get_output_embeddings()
        return not self.trains_output or (name == "weight" and self.model.get_submodule(module) is outputs)

    def copy_to_train(self) -> "LanguageModel":
        """Return a model with its own copy of the trained weights in float32; the other weights are shared."""
        fixed = [weight for name, weight in self.model.named_parameters() if not self.is_trained(name)]
        # Rotary frequencies may change with the length of a text, and the copy is trained in another thread.
        shared = [buffer for name, buffer in self.model.named_buffers() if "inv_freq" not in name]
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in (*fixed, *shared)})
        copied = LanguageModel(model, self.name, self.adapter)
        copied.extra, copied.trains_output = copy.deepcopy(self.extra), self.trains_output
        for weight in copied.trained_weights:
            weight.data = weight.data.float()
            weight.requires_grad_()
        return copied

    def make_reader(self) -> StateReader | None:
        """Return what computes the last hidden states of a text as drafting does, without gradients (T, W); None where
        the model's modules must do it, or logits are more than products with them.
        """
        weights = self._packed_weights
        if not isinstance(weights, CompiledLlamaWeights) or weights.logit_cap or weights.logit_factor != 1:
            return None
        some = weights.make_output_layer(torch.tensor([0]))
        weights.compile(some)  # here, not on the thread that reads
        return partial(CompiledLlamaForward(weights).read_states, output=some)

    def read(self, ids_BT: Tensor) -> Tensor:
        """Compute logits of whole texts, padded on the right, in float32 (B, T, V), without the cache; supports
        gradients.
        """
        self._activate()
        logits_BTV: Tensor = self.model(input_ids=ids_BT, use_cache=False).logits.float()
        return logits_BTV

    def _activate(self) -> None:
        if self.adapter:
            activate(self.model, self.adapter)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence by the model's generation settings; empty if it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write the model as a Hugging Face folder; the adapter is not merged but written to a subfolder."""
        bare = strip_adapters(self.model) if self.adapter else self.model
        with raise_write_errors(folder):
            bare.save_pretrained(folder, state_dict=read_state(bare))
            tokenizer.save_pretrained(folder)
            if self.adapter:
                save_adapter(self.model, self.adapter, folder / ADAPTER_FOLDER)


def load_model(
    source: str,
    dtype: str,
    device: str,
    weights: str = "fastest",
    measurements: Measurements | None = None,
    *,
    batch_invariant: bool = False,
    trained: bool = False,
) -> LanguageModel:
    """Load a causal language model from a hub name, a folder or a GGUF file. `prove_forward` checks how it can be used.
    If below its output layer nothing is trained, the matrices of a GGUF file, and those of 16 bits of a folder, stay
    there where the compiled forward pass is for this model. Raises `ModelError` for a weight that is no finite number.
    """
    maps = None if trained or weights in QUANTISED_BITS else fits_compiled_forward
    model = load_causal_model(source, dtype, device, codes=True, maps=maps)
    if not has_compiled_forward(model):
        drop_groups(model)
    _require_finite(model, source)
    return LanguageModel(model, source, weights=weights, measurements=measurements, batch_invariant=batch_invariant)


def _require_finite(model: Any, source: str) -> None:
    """Look at every weight that is computed with, .15 s for a billion bytes, but not at the codes of a GGUF file. A sum
    is NaN or infinite if one of its terms is.
    """
    coded = has_groups(model)
    weights = [(name, weight.detach()) for name, weight in model.named_parameters() if weight.ndim == 1 or not coded]
    stored = [(f"{name}.weight", find_stored(module)) for name, module in model.named_modules()]
    mapped = [(name, matrix) for name, matrix in stored if matrix is not None and not matrix.has_codes]
    for name, weight in (*weights, *mapped):
        if not (weight.sum(dtype=torch.float32).isfinite() if isinstance(weight, Tensor) else weight.is_finite()):
            raise ModelError(
                f"every weight of {source} must be a finite number, but {name} holds NaN or infinity; "
                "fetch or convert the model again, or choose another"
            )


def read_trained_weights(folder: Path, model: LanguageModel) -> list[Tensor]:
    """Read `model.trained_weights` as of the time when `model.save` wrote this folder."""
    if model.adapter:
        return read_adapter(model.model, model.adapter, folder / ADAPTER_FOLDER)
    dtype = str(model.model.dtype).removeprefix("torch.")
    loaded = load_causal_model(str(folder), dtype, str(model.device))
    return [weight for name, weight in loaded.named_parameters() if model.is_trained(name)]


def fingerprint(model: LanguageModel) -> str:
    """Return a digest of a sample of every weight, and of the weight format; that of a file is remembered."""
    rounded = f" {model.weights} {has_groups(model.model)}" if model.weights in ROUNDING else ""
    form = f"{model.vocabulary_size} {model.model.dtype} {model.weights == 'int8'}{rounded}"
    if not is_mapped(model.model):
        return _digest_weights(model.model, form)
    tied = model.model.config.tie_word_embeddings  # which `untie_output` changes
    key = [digest_file(model.model.files), digest_code(), form, tied]
    known: str = Measurements().get_or_measure("weights", key, lambda: _digest_weights(model.model, form))
    return known


def _digest_weights(model: Any, form: str) -> str:
    digest = hashlib.sha256(form.encode())
    for weight in iterate_weights(model):
        step = max(1, weight.numel() // SAMPLES)
        numbers = weight.sample(step) if isinstance(weight, StoredMatrix) else weight.detach().flatten()[::step]
        digest.update(numbers.float().cpu().numpy().tobytes())
        if isinstance(weight, StoredMatrix):
            weight.release()
    return digest.hexdigest()
