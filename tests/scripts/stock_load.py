"""Load folders with Transformers alone. Arguments: folders that each hold `ours` and `stock`, which are to be equal.

Prints one JSON object: for each folder, by its name, what is wrong with it.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(folder, dtype="auto", output_loading_info=True)


def problems(folder):
    model, loading = load(folder / "ours")
    expected, _ = load(folder / "stock")
    found = [f"{kind}: {sorted(map(str, names))}" for kind, names in loading.items() if names]
    configs = [{**m.config.to_dict(), "_name_or_path": ""} for m in (model, expected)]
    if configs[0] != configs[1]:
        found.append("another configuration")
    if (model.generation_config and model.generation_config.to_dict()) != (
        expected.generation_config and expected.generation_config.to_dict()
    ):
        found.append("other generation settings")
    weights = expected.state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.dtype != weights[name].dtype or not torch.equal(tensor, weights[name]):
            found.append(f"{name} differs")
    return found


if __name__ == "__main__":
    result = {folder.name: problems(folder) for folder in map(Path, sys.argv[1:])}
    assert not any(name.startswith("expertmesh") for name in sys.modules)
    print(json.dumps(result))
