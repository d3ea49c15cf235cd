"""Train a small causal language model from nothing; used by the zoo and by tests, never by a stream.

Shapes: B rows of a batch, T tokens of a row.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    steps: int  # optimiser steps
    rows: int  # sequences of a step
    length: int  # tokens of a sequence
    peak_rate: float  # learning rate after the warm-up (2% of the steps), falling as a cosine to 5%
    seed: int = 0  # order of the windows and initial weights


@dataclass(frozen=True)
class Report:
    """What came of a training."""

    validation_loss: float  # nats per token on the held-out tokens
    train_loss: float  # mean of the last twentieth of the steps, nats per token
    tokens_seen: int  # tokens read, repetitions counted
    seconds: float  # wall time


def _rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak rate at a step: a warm-up over 2% of the steps, then a cosine down to 5%."""
    warm_up = max(1, steps // 50)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def _windows(tokens_N: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts_B = torch.randint(0, len(tokens_N) - length, (rows,), generator=generator)
    return torch.stack([tokens_N[start : start + length] for start in starts_B.tolist()])


def _make_optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    After 160 steps of 1,024 tokens Muon's loss was 5.9 nats where AdamW's was 6.6 (benchmarks/notes/losses.md).
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for parameter in model.parameters():
        (matrices if parameter.dim() == 2 and id(parameter) not in embeddings else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def next_token_loss(model: torch.nn.Module, tokens_BT: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it in its row, in nats (a scalar)."""
    logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: torch.nn.Module, tokens_N: Tensor, length: int, rows: int = 16) -> float:
    """Mean loss over the consecutive windows of `tokens_N`, nats per token."""
    windows = tokens_N[: len(tokens_N) // length * length].view(-1, length)
    losses = [next_token_loss(model, batch) for batch in windows.split(rows)]
    return float(torch.stack(losses).mean())


def optimise(
    model: Any, draw_loss: Callable[[], Tensor], recipe: Recipe, progress: Callable[[int, float], None]
) -> list[float]:
    """Train a causal language model in place and return the losses of the steps.

    Args:
        draw_loss: draws a batch and computes its loss (a scalar).
        progress: called after each step with the step's number (from 1) and its loss.
    """
    optimizers, losses = _make_optimizers(model, recipe.peak_rate), list[float]()
    for step in range(recipe.steps):
        loss = draw_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.peak_rate * _rate_factor(step, recipe.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        progress(step + 1, losses[-1])
    return losses


def pretrain(
    model: Any, train_N: Tensor, held_out_N: Tensor, recipe: Recipe, progress: Callable[[int, float], None]
) -> Report:
    """Train a causal language model in place on random windows of a text, documents joined, and measure it on another.

    `progress` as of `optimise`.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    started = time.perf_counter()

    def draw_loss() -> Tensor:
        return next_token_loss(model, _windows(train_N, recipe.rows, recipe.length, generator))

    losses = optimise(model, draw_loss, recipe, progress)
    tail = losses[-max(1, recipe.steps // 20) :]
    return Report(
        validation_loss=validation_loss(model, held_out_N, recipe.length),
        train_loss=sum(tail) / len(tail),
        tokens_seen=recipe.steps * recipe.rows * recipe.length,
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def sample_text(model: torch.nn.Module, tokenizer: Any, prompt: str, max_new_tokens: int = 60) -> str:
    """Greedy continuation of `prompt` and a line break, for a model card."""
    ids = [tokenizer.bos_token_id, *tokenizer(prompt + "\n", add_special_tokens=False)["input_ids"]]
    for _ in range(max_new_tokens):
        chosen = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        if chosen == tokenizer.eos_token_id:
            break
        ids.append(chosen)
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text[len(prompt) :].strip()
