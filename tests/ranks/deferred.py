"""A script's life around `from_pretrained` and `prepare`, with weights read at once or left in their files.

Arguments: what to do, a model folder or name, and options as JSON. Every rank prints one JSON line.
"""

import json
import os
import resource
import sys
import threading
import zlib

if "DEFERRED_HOMES" in os.environ:
    os.environ["HF_HOME"] = os.path.join(os.environ["DEFERRED_HOMES"], os.environ["RANK"])

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from leaving import leave
from models import batches
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import expertmesh
from expertmesh.checkpoint import reader
from expertmesh.checkpoint.deferred_tensor import DeferredParameter
from expertmesh.ranks import gather


def local_bytes(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def crc(tensors):
    value = 0
    for tensor in tensors:
        value = zlib.crc32(local_bytes(tensor), value)
    return value


def accelerate(options):
    return Accelerator(
        cpu=True,
        mixed_precision=options.get("mixed_precision", "no"),
        parallelism_config=expertmesh.ExpertMeshConfig(**options["mesh"]),
    )


def load(folder, options):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(folder, **options.get("load", {}))
    if "cast" in options:
        model.to(getattr(torch, options["cast"]))
    if "resize" in options:
        model.resize_token_embeddings(options["resize"])
    if options.get("forward_on") in ("all", os.environ["RANK"]):
        with torch.no_grad():
            model(input_ids=batches(1, 1, 4)[0])
    if options.get("adapters"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model.train()


def compare(folder, cases):
    """Train with the weights left in their files, and with the weights read at once."""
    results = {}
    for name, options in cases.items():
        for deferred in ("1", "0"):
            os.environ["EXPERTMESH_DEFERRED_LOAD"] = deferred
            results.setdefault(name, []).append(train(options.get("folder", folder), options))
            AcceleratorState._reset_state(reset_partial_state=True)
    return results


def train(folder, options):
    """Losses, gradients and weights of three steps."""
    accelerator = accelerate(options)
    reference = AutoModelForCausalLM.from_pretrained(folder) if options.get("reference") else None
    model = load(folder, options)
    deferred = sum(isinstance(parameter, DeferredParameter) for parameter in model.parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
    start = crc(model.parameters())
    losses, gradients = [], []
    for step in batches(3, 8, 12):
        mine = step.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=mine, labels=mine).loss
        if reference is not None:
            with torch.no_grad():
                own = reference(input_ids=mine, labels=mine).loss
            loss = loss + own
        accelerator.backward(loss)
        losses.append(loss.item().hex())
        gradients.append(crc(p.grad for p in model.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return dict(
        deferred=deferred, same=[dtypes, start, losses, gradients, crc(model.parameters()), len(model.state_dict())]
    )


def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024


class Peak(threading.Thread):
    """The most anonymous memory this process held while the thread ran; page cache does not count."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = memory("RssAnon")
        self._done = threading.Event()
        self.start()

    def run(self):
        while not self._done.wait(0.002):
            self.most = max(self.most, memory("RssAnon"))

    def growth(self):
        self._done.set()
        self.join()
        return max(self.most, memory("RssAnon")) - self.before


def characters_read():
    with open("/proc/self/io") as io:
        return int(io.readline().split()[1])


def measure(folder, options):
    """What one rank reads and needs for a load, and what it holds afterwards."""
    accelerator = accelerate(options)
    # Imports and first uses are nobody's weights.
    tiny = load(options["tiny"], options)
    accelerator.prepare(tiny, torch.optim.AdamW(tiny.parameters()))
    accelerator.free_memory()
    del tiny
    readings, add = [], reader.Reading.add
    reader.Reading.add = lambda self, other: (readings.append(other), add(self, other))[1]
    dist.barrier()
    before, peak = characters_read(), Peak()
    model = load(folder, options)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    growth, characters = peak.growth(), characters_read() - before
    runs = [(run.tensor, run.start, run.length) for reading in readings for run in reading.runs]
    every = [run for rank in gather(runs) for run in rank]
    return dict(
        growth=growth,
        shard=sum(len(local_bytes(parameter)) for parameter in model.parameters()),
        characters=characters,
        read=sum(length for _, _, length in runs),
        runs=every if accelerator.is_main_process else None,
        largest=max(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        maximum=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def refused(folder, options):
    """The error that stops this rank, as it says it."""
    accelerator = accelerate(options)
    model = load(folder, options)
    if options.get("remove_on") == os.environ["RANK"]:
        source = model.lm_head.weight.source
        source.load.files(source.name)[0].unlink()
    if options.get("fault"):
        seed_fault(options["fault"])
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    except expertmesh.errors.CheckpointError as error:
        return dict(error=str(error))
    return dict(error=None)


def seed_fault(kind):
    """Break the reader in one place, on rank 1 alone."""
    if os.environ["RANK"] != "1":
        return
    read_box = reader.read_box

    def faulty(plan, name, box, destination):
        reading = read_box(plan, name, box, destination)
        if name.endswith("layers.1.mlp.experts.down_proj"):
            if kind == "shifted":
                destination.copy_(destination.flatten().roll(1).view_as(destination))
            else:
                destination[0, 0, 0] += 1e-3
        return reading

    reader.read_box = faulty


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, options = sys.argv[1:4]
    result = {"compare": compare, "measure": measure, "refused": refused}[what](folder, json.loads(options))
    print(json.dumps(result), flush=True)
    leave()
