"""The hook at the end of `import torch`: whom it touches, what all others import for it, and that it never breaks."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from expertmesh_plugins.accelerate import autoload
from processes import run_command

from expertmesh.after_import import AfterImport
from expertmesh.errors import CONFIG_EXIT_CODE

ACTIVATE = """
import sys
import abc, collections.abc, importlib.abc, importlib.metadata, importlib.util  # Every `import torch` loads these.
modules, finders = set(sys.modules), list(sys.meta_path)
from expertmesh_plugins.accelerate.autoload import activate
activate()
print(sorted(set(sys.modules) - modules), sys.meta_path == finders, sys.excepthook is sys.__excepthook__)
"""

WORKER = """
import copy, pickle
import accelerate, accelerate.utils
import accelerate.parallelism_config as defining

config = accelerate.ParallelismConfig()
from expertmesh_plugins.accelerate.parallelism import ExpertMeshConfig

assert type(config) is ExpertMeshConfig and config.ep_size == 1, config
assert isinstance(ExpertMeshConfig(), accelerate.ParallelismConfig)
assert accelerate.ParallelismConfig is accelerate.utils.ParallelismConfig is defining.ParallelismConfig
assert ExpertMeshConfig.__bases__ == (accelerate.ParallelismConfig,)
assert type(accelerate.utils.ParallelismConfig(dp_replicate_size=1, cp_backend="torch")) is ExpertMeshConfig
assert type(copy.deepcopy(config)) is type(pickle.loads(pickle.dumps(config))) is ExpertMeshConfig

class Theirs(accelerate.ParallelismConfig):
    pass

assert type(Theirs(dp_shard_size=2)) is Theirs
print("ALL HELD", flush=True)
accelerate.ParallelismConfig(dp_shard_size=3)
"""

LAUNCHERS = [
    (["/usr/bin/accelerate", "launch", "train.py"], []),
    (["/usr/bin/accelerate-launch", "train.py"], []),
    (["-m", "train.py"], ["python", "-u", "-m", "accelerate.commands.launch", "train.py"]),
    (["-m", "train.py"], ["python", "-maccelerate.commands.launch", "train.py"]),
    (["-m", "launch", "train.py"], ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "train.py"]),
]
OTHERS = [
    ([], []),
    ([""], [""]),
    (["train.py"], []),
    (["/usr/bin/accelerate", "config"], []),
    (["/usr/bin/accelerate"], []),
    (["train.py", "launch"], []),
    (["-m", "config"], ["python", "-m", "accelerate.commands.accelerate_cli", "config"]),
    (["-m", "accelerate.commands.launch"], ["python", "-m", "pytest", "accelerate.commands.launch"]),
]


@pytest.fixture
def process(monkeypatch):
    """Let this process look like another one."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("PARALLELISM_CONFIG_EP_SIZE", raising=False)

    def look_like(argv, original=()):
        monkeypatch.setattr(sys, "argv", list(argv))
        monkeypatch.setattr(sys, "orig_argv", list(original) or ["python", *argv])

    return look_like


def added_finders():
    return [finder for finder in sys.meta_path if isinstance(finder, AfterImport)]


@pytest.mark.parametrize(("argv", "original"), LAUNCHERS)
def test_every_launcher_is_recognised(process, argv, original):
    process(argv, original)
    autoload.activate()
    assert len(added_finders()) == 1


@pytest.mark.parametrize(("argv", "original"), OTHERS)
def test_nobody_else_is(process, argv, original):
    process(argv, original)
    autoload.activate()
    assert not added_finders()


def test_a_worker_is_recognised_by_its_environment(process, monkeypatch):
    process(["train.py"])
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    before = sys.excepthook
    autoload.activate()
    assert len(added_finders()) == 2
    assert sys.excepthook is not before


@pytest.mark.parametrize("kind", ["launcher", "worker"])
def test_it_can_be_switched_off(process, monkeypatch, kind):
    process(LAUNCHERS[0][0] if kind == "launcher" else ["train.py"])
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    monkeypatch.setenv("EXPERTMESH_AUTOLOAD", "0")
    autoload.activate()
    assert not added_finders()


def test_a_plain_process_imports_three_modules_and_is_not_touched():
    finished = run_command([sys.executable, "-c", ACTIVATE])
    ours = ["expertmesh_plugins", "expertmesh_plugins.accelerate", "expertmesh_plugins.accelerate.autoload"]
    assert finished.output == f"--- stdout\n{ours} True True\n\n--- stderr\n"


def test_a_broken_hook_is_reported_and_does_not_raise(process, monkeypatch, capsys):
    process(LAUNCHERS[0][0])
    monkeypatch.setattr(autoload, "_is_launcher", None)
    autoload.activate()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("expertmesh: ")
    assert "EXPERTMESH_AUTOLOAD=0" in line


@pytest.fixture
def awaited(process, monkeypatch, tmp_path):
    """The name of a module that can be imported, and is forgotten afterwards."""
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "awaited_module"
    sys.modules.pop("awaited_module", None)


def test_the_callback_gets_the_executed_module_once(awaited):
    seen = []
    sys.meta_path.insert(0, AfterImport(awaited, lambda module: seen.append(module.value)))
    assert importlib.util.find_spec(awaited) is not None
    assert seen == []
    __import__(awaited)
    assert seen == [1]
    assert not added_finders()


def test_a_module_whose_code_was_running_before_is_looked_after_at_the_next_import(awaited, monkeypatch, tmp_path):
    (tmp_path / "awaited_module.py").write_text(
        "import sys\n"
        "from expertmesh.after_import import AfterImport\n"
        "sys.meta_path.insert(0, AfterImport(__name__, lambda module: module.seen.append(module.value)))\n"
        "seen = []\n"
        "value = 1\n"
    )
    module = __import__(awaited)
    assert module.seen == []
    for _ in range(2):
        sys.modules.pop("this", None)
        importlib.util.find_spec("this")
        assert module.seen == [1]


@pytest.mark.parametrize("first", ["from transformers import Trainer", "import accelerate"])
def test_a_worker_loads_weights_our_way_whatever_imports_torch(first):
    program = f"{first}\nfrom transformers import Qwen3MoeForCausalLM as M\nprint(M._load_pretrained_model.__module__)"
    finished = run_command([sys.executable, "-c", program], env={"PARALLELISM_CONFIG_EP_SIZE": "1"})
    assert finished.stdout.strip() == autoload.__name__, finished.output


def test_a_failing_callback_is_reported_and_the_import_succeeds(awaited, capsys):
    sys.meta_path.insert(0, AfterImport(awaited, lambda module: module.absent))
    assert __import__(awaited).value == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("expertmesh: ")
    assert "AttributeError" in line


def test_in_a_worker_constructing_the_config_gives_ours(tmp_path):
    (tmp_path / "train.py").write_text(WORKER)
    finished = run_command([sys.executable, tmp_path / "train.py"], env={"PARALLELISM_CONFIG_EP_SIZE": "1"})
    assert "ALL HELD" in finished.stdout, finished.output
    assert finished.returncode == CONFIG_EXIT_CODE, finished.output
    (line,) = finished.stderr.splitlines()
    assert line.startswith("expertmesh: ")
