"""Put a new folder where an old one is, so that a kill between any two system calls leaves one of them whole.

The new folder is renamed to `NAME.replaced` and then exchanged with the old one in one system call. Where the file
system cannot exchange, the old folder steps aside to `NAME.replaced` first; for that moment it is found there
(`publish.resolve`). What is somebody else's in the old folder (logs, other checkpoints) is linked into the new one
before, so that it is never away, and nothing of it is copied.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath

from expertmesh.checkpoint.manifest import MANIFEST, Manifest
from expertmesh.errors import CheckpointError

# What Transformers, Trainer, Accelerate and expertmesh write into a checkpoint. A model that is replaced must not leave
# a part behind that a reader prefers to the new one.
_CHECKPOINT_ENTRIES = (
    MANIFEST,
    f"{MANIFEST}.tmp",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.*",
    "adapter_config.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model_fsdp_[0-9]*",
    "optimizer",
    "optimizer_[0-9]*",
    "optimizer*.bin",
    "optimizer.pt",
    "scheduler*.bin",
    "scheduler.pt",
    "scaler.pt",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "random_states_[0-9]*.pkl",
    "rng_state*.pth",
    "trainer_state.json",
    "training_args.bin",
)
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2
_AT_FDCWD = -100
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def aside_of(final: Path) -> Path:
    """Where the other one of an old and a new `final` is while they change places."""
    return final.with_name(f"{final.name}.replaced")


def put_in_place(new: Path, final: Path) -> None:
    """Make `new` the folder `final`, keep the foreign entries of a `final` that exists, remove the rest of it.

    Both are folders of one file system. When this returns the change is durable.

    Raises:
        OSError: `final` is then what it was.
    """
    if not os.path.lexists(final):
        new.rename(final)
        _flush(final.parent)
    elif Path.cwd().is_relative_to(final):
        # The working directory of this and other processes would be gone.
        _merge(new, final)
    else:
        shutil.copymode(final, new)
        # Not every file system has links: what cannot be linked is moved after the swap.
        with suppress(OSError):
            _keep_foreign(final, new, _link)
        _flush_folders(new)
        _swap(new, final)
        _flush(final.parent)
        finish(final)


def finish(final: Path) -> None:
    """Bring a swap that was cut short (or is just done) to its end; nothing happens if there was none."""
    aside = aside_of(final)
    if not aside.is_dir():
        return
    if not os.path.lexists(final):
        aside.rename(final)
    else:
        _keep_foreign(aside, final, os.rename)
        _discard(aside)
    _flush(final.parent)


def flush_tree(folder: Path) -> None:
    """Make every file and folder below (and including) `folder` durable."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            _flush(path)
    _flush_folders(folder)


def _flush_folders(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        _flush(Path(parent))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(new: Path, final: Path) -> None:
    aside = aside_of(final)
    new.rename(aside)
    if _exchange(aside, final):
        return
    aside.rename(new)
    final.rename(aside)
    try:
        new.rename(final)
    except OSError:
        aside.rename(final)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where that does not exist."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _merge(new: Path, final: Path) -> None:
    """Move what `new` has into `final`; until the last of it has arrived, `final` says that it is incomplete."""
    foreign = {PurePosixPath(name).parts[0] for name in _foreign(final, new)}
    last = [path for path in sorted(new.glob("*.index.json"))] + [path for path in (new / MANIFEST,) if path.exists()]
    for path in (final / MANIFEST, *final.glob("*.index.json")):
        path.unlink(missing_ok=True)
    _flush(final)
    for path in list(final.iterdir()):
        if path.name not in foreign:
            _remove(path)
    shutil.copymode(final, new)
    hold_back = shutil.ignore_patterns(*(path.name for path in last))
    shutil.copytree(new, final, symlinks=True, ignore=hold_back, copy_function=os.replace, dirs_exist_ok=True)
    _flush_folders(final)
    for path in last:
        path.rename(final / path.name)
    _flush(final)
    shutil.rmtree(new)


def _discard(folder: Path) -> None:
    """Remove a checkpoint that has been replaced; what resists, because it is in use, is left to the next attempt."""
    # The manifest goes last: without it the next attempt would take the rest for somebody else's.
    for path in folder.iterdir():
        if path.name != MANIFEST:
            with suppress(OSError):
                _remove(path)
    shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _keep_foreign(old: Path, new: Path, bring: Callable[[Path, Path], object]) -> None:
    for name in list(_foreign(old, new)):
        target = Path(new, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        bring(Path(old, name), target)


def _link(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=partial(os.link, follow_symlinks=False))
    else:
        os.link(source, target, follow_symlinks=False)


def _foreign(old: Path, new: Path) -> Iterator[str]:
    """What of `old` no checkpoint wrote and `new` does not have: files and whole folders, by path in `old`."""
    try:
        listed = set(Manifest.read(old).files)
    except CheckpointError:
        listed = set()
    parents = {str(parent) for name in listed for parent in PurePosixPath(name).parents}

    def below(relative: PurePosixPath) -> Iterator[str]:
        for entry in sorted(os.scandir(Path(old, relative)), key=lambda entry: entry.name):
            path = relative / entry.name
            name, other = str(path), Path(new, path)
            if name in listed or any(fnmatchcase(path.parts[0], pattern) for pattern in _CHECKPOINT_ENTRIES):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and (name in parents or (other.is_dir() and not other.is_symlink())):
                yield from below(path)
            elif not os.path.lexists(other):
                yield name

    yield from below(PurePosixPath())
