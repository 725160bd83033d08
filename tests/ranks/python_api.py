"""Expert parallelism without a launch configuration: the two ways that need nothing but a keyword argument."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from leaving import leave
from models import batches, build
from transformers import Trainer, TrainingArguments

import expertmesh
from expertmesh.expert_parallel import is_expert_parallel


def with_accelerator(mixed_precision: str) -> list[float]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        parallelism_config=expertmesh.ExpertMeshConfig(dp_shard_size=2, ep_size=2),
    )
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert is_expert_parallel(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    losses = []
    for step in batches(3, 8, 12):
        mine = step.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=mine, labels=mine).loss
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_training_arguments() -> list[float]:
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
        parallelism_config=expertmesh.ExpertMeshConfig(dp_shard_size=2, ep_size=2),
    )
    rows = [{"input_ids": row, "labels": row} for row in batches(3, 8, 12).flatten(0, 1)]
    trainer = Trainer(model=build(), args=arguments, train_dataset=rows)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    assert is_expert_parallel(trainer.model)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode = sys.argv[1]
    losses = with_training_arguments() if mode == "trainer" else with_accelerator(mode)
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    leave()
