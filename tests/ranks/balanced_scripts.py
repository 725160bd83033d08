"""Scripts of three kinds, balanced: run by `test_balance.py` in one process and in two; rank 0 prints JSON.

In each the targets are spread unevenly over the batch, an optimizer step has two micro-batches, and the model has an
auxiliary loss and a z-loss. Printed are the losses, which are without the z-loss, and the gradient norms of the steps.
"""

from __future__ import annotations

import json
import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from leaving import leave
from models import VOCABULARY, batches, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from expertmesh import ExpertMeshConfig
from expertmesh.errors import ModelError

STEPS, MICRO_BATCHES, ROWS, LENGTH = 2, 2, 4, 12
Log = list[list[float]]


def balanced() -> ExpertMeshConfig:
    return ExpertMeshConfig(ep_size=num_processes(), ep_z_loss=0.1)


def num_processes() -> int:
    return int(os.environ["WORLD_SIZE"])


def model() -> PreTrainedModel:
    built = build(router_aux_loss_coef=0.5)
    built.config.output_router_logits = True
    return built


def rows(uneven: bool = True) -> list[dict[str, list[int]]]:
    """Sequences of which only the first few tokens are targets, every time another number if `uneven`."""
    tokens = batches(STEPS * MICRO_BATCHES * ROWS, 1, LENGTH).squeeze(1)
    targets = [
        row.masked_fill(torch.arange(LENGTH) > 2 + number % 7 * uneven, -100) for number, row in enumerate(tokens)
    ]
    return [{"input_ids": row.tolist(), "labels": kept.tolist()} for row, kept in zip(tokens, targets, strict=True)]


def arguments(output: str, **more: object) -> dict[str, object]:
    return {
        "output_dir": output,
        "per_device_train_batch_size": ROWS // num_processes(),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "parallelism_config": balanced(),
        **more,
    }


def trained(trainer: Trainer) -> Log:
    trainer.train()
    return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]


def by_trainer(output: str, *, uneven: bool = True, **more: object) -> Log:
    """`transformers.Trainer`, which divides by the number of all targets, or with `more` by the rank's."""
    settings = TrainingArguments(**arguments(output, **more))
    return trained(Trainer(model=model(), args=settings, train_dataset=rows(uneven)))


def by_trl(output: str) -> Log:
    """TRL's `SFTTrainer`, which computes its loss itself, although the model returns one."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t2"
    )
    settings = SFTConfig(**arguments(output, gradient_checkpointing=False, bf16=False, router_aux_loss_coef=0.5))
    data = Dataset.from_list(rows())
    return trained(SFTTrainer(model=model(), args=settings, train_dataset=data, processing_class=tokenizer))


def by_hand() -> Log:
    """A bare loop that computes its loss from the logits. Its model has a correction bias, which comes last."""
    AcceleratorState._reset_state()  # Else it keeps the configuration of the scripts before.
    config = ExpertMeshConfig(ep_size=num_processes(), ep_z_loss=0.1, ep_balance_bias_rate=0.01)
    accelerator = Accelerator(parallelism_config=config, gradient_accumulation_steps=MICRO_BATCHES)
    network = build("deepseek_v3")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    network, optimizer = accelerator.prepare(network, optimizer)
    log, losses = [], []
    for tokens in batches(STEPS * MICRO_BATCHES, ROWS, LENGTH):
        with accelerator.accumulate(network):
            loss = next_token_loss(network, tokens.chunk(num_processes())[accelerator.process_index])
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(network.parameters(), 1e9)
                log.append([sum(losses), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)])
                losses = []
            optimizer.step()
            optimizer.zero_grad()
    forgotten(network, tokens)
    (bias,) = (tensor for name, tensor in network.state_dict().items() if name.endswith("e_score_correction_bias"))
    assert bias.any(), "no bias was moved"
    return [*log, bias.tolist()]


def next_token_loss(network: nn.Module, tokens: Tensor) -> Tensor:
    logits = network(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def forgotten(network: nn.Module, tokens: Tensor) -> None:
    """A backward pass from a loss that the z-loss was not added to is an error."""
    try:
        next_token_loss(network, tokens).backward()
    except ModelError as error:
        assert "call `accelerator.backward(loss)`" in str(error)
    else:
        raise AssertionError("nobody noticed")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "trainer": by_trainer(folder),
            "trainer-of-means": by_trainer(folder, uneven=False, average_tokens_across_devices=False),
            "trl": by_trl(folder),
            "by-hand": by_hand(),
        }
    if dist.get_rank() == 0:
        print(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
