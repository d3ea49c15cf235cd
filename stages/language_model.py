"""A causal language model over rows of unequal length, with its own key-value cache.

Shapes: B rows, Q new tokens of the longest row, K keys, V vocabulary, W hidden width.
"""

import copy
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.adapters import ADAPTER_FOLDER, activate, is_of, read_adapter, save_adapter, without_adapters
from stages.blocks import Row
from stages.draws import SeededDraws
from stages.forward import Forward, ModuleForward
from stages.huggingface import load_causal_model
from stages.lean import LeanForward
from stages.lean_weights import LeanWeights, is_lean
from stages.saving import writing
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.errors import ModelError

PRUNE_BELOW = 0.75  # share of the output layer's lines: computing fewer saves more than putting them in their places


def _max_length(config: Any) -> int:
    """Longest text of a model, in tokens. Our masks are causal without a window, so a sliding one ends the text."""
    longest: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    window: int | None = getattr(config, "sliding_window", None)
    slides = getattr(config, "use_sliding_window", True) and window
    return min(longest, window) if slides and window else longest


class LanguageModel:
    """A causal language model over rows of unequal length, with its own key-value cache.

    Several may stand on the same modules, each with rows and, if it has one, an adapter of its own.

    Args:
        model: any Hugging Face causal language model whose attention takes a boolean mask (`sdpa`).
        name: for messages.
        adapter: name of the injected adapter to compute with.
        weights: how the lean forward lays out its weights, see `LeanWeights`.
        lean: such weights of this model that are there already.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        adapter: str | None = None,
        *,
        weights: str = "fastest",
        lean: LeanWeights | None = None,
    ) -> None:
        self.model, self.name, self.adapter = model.eval(), name, adapter
        self.device: torch.device = next(model.parameters()).device
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self.max_length: int = _max_length(model.config.get_text_config())
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self.weights, self._lean = weights, lean
        self._order: list[Row] = []
        self._lengths: dict[Row, int] = {}

    @cached_property
    def forward_pass(self) -> Forward:
        """How it reads: by the lean forward where that is written for the architecture and computes the same."""
        if self.adapter or not is_lean(self.model):
            return ModuleForward(self.model)
        if self._lean is None:
            self._lean = LeanWeights(self.model, self.weights)
        return LeanForward(self._lean)

    def beside(self, adapter: str | None = None) -> "LanguageModel":
        """Another one over the same weights, with rows of its own."""
        lean = None if adapter else self._lean
        made = LanguageModel(self.model, self.name, adapter or self.adapter, weights=self.weights, lean=lean)
        if isinstance(self.forward_pass, ModuleForward):
            made.forward_pass = ModuleForward(self.model)
        return made

    def admit(self, row: Row, tokens: Sequence[int]) -> None:
        """Take a row in and read all of its tokens but the last."""
        self._order.append(row)
        self._lengths[row] = 0
        self.forward_pass.reserve(len(self._order), len(tokens) + row.room)
        if len(tokens) > 1:
            self._read(len(self._order) - 1, [row], [tokens[:-1]], [0], hidden=False)

    @torch.inference_mode()  # the cache's tensors are made in it
    def release(self, row: Row) -> None:
        """Let a row go; the last row takes its place."""
        place = self._order.index(row)
        last = self._order.pop()
        if last is not row:
            self.forward_pass.move(len(self._order), place)
            self._order[place] = last
        del self._lengths[row]

    def mask_without(self, allowed: Collection[int]) -> Tensor:
        """True for every output of the model that is not among the allowed ids (V,)."""
        forbidden_V = torch.ones(self.vocabulary_size, dtype=torch.bool, device=self.device)
        forbidden_V[torch.tensor(sorted(allowed), dtype=torch.long, device=self.device)] = False
        return forbidden_V

    def require_rows(self) -> None:
        """Check that reading through our cache gives what the model gives for a whole text.

        Where the lean forward does not, the model's own modules are used.

        Raises:
            ModelError: if these do not either (models with recurrent state, or an attention of their own).
        """
        exact = self.model.dtype in (torch.float32, torch.float64) and self.weights != "int8"
        if isinstance(self.forward_pass, LeanForward) and self._deviation() > (1e-3 if exact else 0.3):
            self.forward_pass = ModuleForward(self.model)
        if isinstance(self.forward_pass, ModuleForward) and self._deviation() > 0.1:
            raise ModelError(
                f"{self.name} must give the same logits for a text read at once and in parts, but does not: it keeps "
                "state that the row cache cannot hold; use a model with plain causal attention"
            )

    def _deviation(self) -> float:
        """Largest difference between the logits of a text read at once and in parts, in their standard deviations."""
        tokens = [3 + 5 * place % max(1, self.vocabulary_size - 3) for place in range(8)]
        row = Row(0, "", "", "", tokens, len(tokens), [], SeededDraws(0, 0), 0)
        with torch.inference_mode():
            whole_V = self.model(input_ids=torch.tensor([tokens], device=self.device)).logits[0, -1].float()
        self.admit(row, tokens[:4])
        other = Row(1, "", "", "", tokens[:3], 3, [], SeededDraws(0, 0), 0)
        self.admit(other, other.tokens)
        self.forward([row, other], [[*tokens[3:5], tokens[0]], tokens[2:3]], [1, 0])  # rows of unequal length
        self.roll_back(row, 5)  # the last is taken back
        self.release(other)
        self.forward([row], [tokens[5:7]], [0])
        by_rows_V = self.forward([row], [tokens[7:]], [1])[0][0].float()  # one token alone has kernels of its own
        self.release(row)
        return float((whole_V - by_rows_V).abs().max() / whole_V.std().clamp(min=1e-6))

    def restrict(self, ids: Collection[int]) -> None:
        """Only the logits of these ids will be looked at; the others are not computed where leaving them out pays."""
        if isinstance(self.forward_pass, LeanForward):
            self.forward_pass.restrict(sorted(ids) if len(ids) < PRUNE_BELOW * self.vocabulary_size else None)

    def save_rows(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`: the rows with their keys and values, to the last bit."""
        rows = []
        for place, row in enumerate(self._order):
            if not keep.keeps(row):
                continue
            kept = [keep.tensor(tensor) for tensor in self.forward_pass.kept(place, self._lengths[row])]
            rows.append([keep.row(row), self._lengths[row], kept])
        return {"capacity": self.forward_pass.capacity, "rows": rows}

    @torch.inference_mode()
    def restore_rows(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        self._order = [kept.row(number) for number, _, _ in saved["rows"]]
        self._lengths = {kept.row(number): length for number, length, _ in saved["rows"]}
        if self._order:
            self.forward_pass.reserve(len(self._order), saved["capacity"])
        for place, (_, _, tensors) in enumerate(saved["rows"]):
            self.forward_pass.put(place, [kept.tensor(number).to(self.device) for number in tensors])

    def length(self, row: Row) -> int:
        """How many tokens of the row are in the cache."""
        return self._lengths[row]

    def roll_back(self, row: Row, length: int) -> None:
        """Forget a row's tokens behind the first `length`."""
        self._lengths[row] = min(length, self._lengths[row])

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], wanted: Sequence[int], *, hidden: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Read new tokens of every admitted row, in order of admission.

        Args:
            rows: all admitted rows.
            tokens: new tokens per row; none for a row that rests.
            wanted: at how many of each row's last new tokens the logits are wanted.
            hidden: whether the last hidden states are wanted too.

        Returns:
            logits (N, V) at the wanted places, rows joined, and the hidden states behind them (N, W), or the logits
            again.
        """
        if list(rows) != self._order:
            raise ValueError("rows must be all admitted rows in the order of admission")
        return self._read(0, rows, tokens, wanted, hidden=hidden)

    @torch.inference_mode()
    def _read(
        self, first: int, rows: Sequence[Row], tokens: Sequence[Sequence[int]], wanted: Sequence[int], *, hidden: bool
    ) -> tuple[Tensor, Tensor]:
        self._activate()
        starts = [self._lengths[row] for row in rows]
        for row, new in zip(rows, tokens, strict=True):
            self._lengths[row] += len(new)
        self.forward_pass.reserve(len(self._order), max(self._lengths[row] for row in rows))
        return self.forward_pass(first, tokens, starts, wanted, hidden=hidden)

    @torch.no_grad()
    def serve(self, weights: Sequence[Tensor]) -> None:
        """Take these as the learning weights, from the next pass on."""
        for own, new in zip(self.learning, weights, strict=True):
            own.copy_(new)
        self.forward_pass.refresh()

    @property
    def learning(self) -> list[Tensor]:
        """The weights that learning changes, always in the same order: the adapter's if there is one, else all."""
        return [weight for name, weight in self.model.named_parameters() if self._learns(name)]

    def _learns(self, weight: str) -> bool:
        return self.adapter is None or is_of(weight, self.adapter)

    def copy_to_train(self) -> "LanguageModel":
        """A model beside this one whose learning weights are its own, in float32; the others are shared."""
        fixed = [weight for name, weight in self.model.named_parameters() if not self._learns(name)]
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in (*fixed, *self.model.buffers())})
        copied = LanguageModel(model, self.name, self.adapter)
        for weight in copied.learning:
            weight.data = weight.data.float()
            weight.requires_grad_()
        return copied

    def read(self, ids_BT: Tensor, positions_BT: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        """Logits of whole texts in float32 (B, T, V), without rows; gradients flow where they are enabled."""
        self._activate()
        output = self.model(input_ids=ids_BT, attention_mask=mask_B1TT, position_ids=positions_BT, use_cache=False)
        logits_BTV: Tensor = output.logits.float()
        return logits_BTV

    def _activate(self) -> None:
        if self.adapter:
            activate(self.model, self.adapter)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a sequence by the model's generation settings; empty if it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder of the model as it now is; the adapter goes beside it, not merged."""
        bare = without_adapters(self.model) if self.adapter else self.model
        with writing(folder):
            bare.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if self.adapter:
                save_adapter(self.model, self.adapter, folder / ADAPTER_FOLDER)


def load_model(source: str, dtype: str, device: str, weights: str = "fastest") -> LanguageModel:
    """Load a causal language model from a hub name or folder. `require_rows` says whether it can be used.

    Args:
        source: where it is.
        dtype, device: what it is computed in, and where.
        weights: how the lean forward keeps its weights: `fastest` is what is measured to be so among equal ones, `int8`
            is another, smaller model.

    Raises:
        ModelError: if there is none there, or the hub cannot be reached.
    """
    return LanguageModel(load_causal_model(source, dtype, device), source, weights=weights)


def read_learning(folder: Path, model: LanguageModel) -> list[Tensor]:
    """What `model.learning` was when `model.save` wrote this folder.

    Raises:
        ModelError: if the folder holds no such model.
    """
    if model.adapter:
        return read_adapter(model.model, model.adapter, folder / ADAPTER_FOLDER)
    dtype = str(model.model.dtype).removeprefix("torch.")
    return list(load_causal_model(str(folder), dtype, str(model.device)).parameters())
