"""A bare Accelerate loop that saves, goes on, and resumes from checkpoints that other launches of it saved.

Arguments: how many micro-batches make a step, where to save (`-` for nowhere), and what to resume from. Prints a JSON
line for the uninterrupted run and for each resumed one: the losses of its last three steps, and a digest of the
parameters and of Adam's state where they begin.
"""

import hashlib
import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

accumulation, target, *sources = int(sys.argv[1]), sys.argv[2], *sys.argv[3:]
accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
if "STOCK_FSDP2" in os.environ:
    # Accelerate turns FSDP on by itself on accelerators only.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
set_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = torch.randint(3, 12, (40, 12), generator=torch.Generator().manual_seed(1))
# Eight sequences an optimizer step, however many processes share them.
loader = DataLoader(data, batch_size=8 // accelerator.num_processes // accumulation)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(scheduler)
batches = list(loader)
saved_after = 2 * accumulation


def train(batches):
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
    steps = [losses[i : i + accumulation] for i in range(0, len(losses), accumulation)]
    return [sum(step) / len(step) for step in steps]


def digest():
    whole = accelerator.unwrap_model(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters = get_model_state_dict(whole, options=options)
    # AcceleratedOptimizer is not stepped, and so has no state to read, where it believes gradients to accumulate.
    states = get_optimizer_state_dict(whole, optimizer.optimizer, options=options)
    found = hashlib.sha256()
    for name in sorted(parameters):
        found.update(name.encode() + parameters[name].numpy().tobytes())
    for name in sorted(states.get("state", {})):
        for key in sorted(states["state"][name]):
            found.update(f"{name}.{key}".encode() + states["state"][name][key].float().numpy().tobytes())
    return found.hexdigest() + f" {scheduler.last_epoch} {optimizer.param_groups[0]['lr']:.9f}"


def report(begin, losses):
    if accelerator.is_main_process:
        print(json.dumps({"begin": begin, "losses": losses}), flush=True)


if target != "-":
    train(batches[:saved_after])
    begin = digest()
    accelerator.save_state(target)
    report(begin, train(batches[saved_after:]))
for source in sources:
    accelerator.load_state(source)
    report(digest(), train(batches[saved_after:]))
accelerator.end_training()
