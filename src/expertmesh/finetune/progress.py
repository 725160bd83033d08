"""What a running fine-tune shows: a bar with loss, tokens per second and expert imbalance, on rank 0."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from expertmesh.observe import ExpertLoad


class FinetuneProgress(TrainerCallback):
    """Replaces Trainer's own progress report. Needs `include_num_input_tokens_seen`, which counts over all ranks.

    Adds `tokens_per_second` and `expert_imbalance` to the logs, so that they reach the log history and trackers.
    Where there is no terminal, a line is printed at each report instead of a bar.
    """

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._load: ExpertLoad | None = None
        self._tokens, self._since = 0, time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        self._load = ExpertLoad(model)
        # `disable=None` is tqdm's "only on a terminal".
        quiet = None if state.is_world_process_zero else True
        self._bar = tqdm(
            desc="training",
            unit="step",
            initial=state.global_step,
            total=state.max_steps,
            dynamic_ncols=True,
            disable=quiet,
        )
        self._restart(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if "loss" not in logs:
            return
        seconds = time.perf_counter() - self._since
        logs["tokens_per_second"] = (state.num_input_tokens_seen - self._tokens) / seconds
        logs["expert_imbalance"] = self._load.imbalance()
        state.log_history[-1].update(logs)
        self._show(state, _summary(logs))
        self._restart(state)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        perplexity = metrics["eval_perplexity"]
        if state.is_world_process_zero:
            tqdm.write(f"held-out perplexity after step {state.global_step}: {perplexity:.2f}")
        # The time it took is no training time.
        self._restart(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # Nor is this.
        self._restart(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar.close()

    def _show(self, state: TrainerState, summary: str) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(summary)
        elif state.is_world_process_zero:
            print(f"step {state.global_step}/{state.max_steps}: {summary}", flush=True)

    def _restart(self, state: TrainerState) -> None:
        self._tokens, self._since = state.num_input_tokens_seen, time.perf_counter()


def held_out_perplexities(state: TrainerState) -> dict[int, float]:
    """The held-out perplexity by the number of steps after which it was measured, also before a resume."""
    return {entry["step"]: entry["eval_perplexity"] for entry in state.log_history if "eval_perplexity" in entry}


def _summary(logs: dict[str, float]) -> str:
    parts = [f"loss {logs['loss']:.3f}", f"{logs['tokens_per_second']:,.0f} tokens/s"]
    if not math.isnan(logs["expert_imbalance"]):
        parts.append(f"expert imbalance {logs['expert_imbalance']:.2f}")
    return ", ".join(parts)
