"""Publications that are killed, fail or run in a background thread.

publishing.py kill FOLDER {exchange,aside,merge}   dies at every system call in turn, then at random moments
publishing.py fail FOLDER                          what a user sees when a folder cannot be written
publishing.py ranks FOLDER                         several ranks; prints the messages of each as JSON
"""

import ctypes
import errno
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path

import torch.distributed as dist
from leaving import leave

from expertmesh.checkpoint.agree import agree, agreed
from expertmesh.checkpoint.manifest import MANIFEST, Manifest, describe_files, verify_files
from expertmesh.checkpoint.publish import Publication, incomplete, latest, resolve
from expertmesh.errors import CheckpointError
from expertmesh.ranks import gather, world

FOREIGN = {"logs/run/a.log": "log", "note.txt": "note"}
FILES = ("config.json", "model-00001-of-00001.safetensors", "optimizer/__0_0.distcp")
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.utime")


def publish(final, version, group=None):
    with Publication(final, group) as publication:
        if world(group)[0] == 0:
            for name in (*FILES, f"only-{version}.bin"):
                path = publication.content / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(str(version))
        with agreed("meet", group):
            pass
        files = describe_files(publication.content, group)
        if world(group)[0] == 0:
            Manifest(step=version, files=files).write(publication.content)


def check(final, foreign=FOREIGN, clutter=False):
    """The folder is one version as a whole, has all foreign files and (but for clutter) no other; gives its version."""
    folder = resolve(final)
    manifest = verify_files(folder)
    for name in manifest.files:
        assert (folder / name).read_text() == str(manifest.step), name
    for name, text in foreign.items():
        assert (folder / name).read_text() == text, name
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    rest = there - {MANIFEST, *manifest.files, *foreign}
    assert not rest or (clutter and all(name.startswith("only-") for name in rest)), rest
    return manifest.step


def add_foreign(final):
    for name, text in FOREIGN.items():
        path = final / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def forked(function, *arguments):
    """Run a function in a child; returns its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def die_at(number):
    """SIGKILL this process right before its `number`-th change of a file system."""
    left = number

    def count(event, arguments):
        nonlocal left
        if event in CHANGES or (event == "open" and arguments[2] & os.O_CREAT):
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def publish_and_die(final, version, number):
    die_at(number)
    publish(final, version)


def killed(status):
    """Whether the status of `waitpid` is a SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_everywhere(final, merge):
    publish(final, 0)
    add_foreign(final)
    randomness = random.Random(0)
    number, version, seen = 0, 1, set()
    while True:
        before = check(final, clutter=merge)
        _, status = os.waitpid(forked(publish_and_die, final, version, number), 0)
        if not killed(status):
            assert status == 0
            break
        if merge:
            # A folder that processes work in is not replaced as a whole; it says so while it is incomplete.
            if (final / MANIFEST).exists():
                seen.add(check(final, clutter=True) == version)
            else:
                assert latest(final.parent) is None
        else:
            assert check(final) in (before, version)
            seen.add(check(final) == version)
            # Dying in the repair of what an earlier death left does no harm either.
            os.waitpid(forked(publish_and_die, final, version, randomness.randrange(number + 1)), 0)
            assert check(final) in (before, version)
        publish(final, version + 1)
        assert check(final, clutter=merge) == version + 1
        for path in set(final.glob("only-*")) - {final / f"only-{version + 1}.bin"}:
            path.unlink()
        assert not incomplete(final.parent) and sorted(os.listdir(final.parent)) == [final.name]
        number, version = number + 1, version + 2
    assert check(final, clutter=merge) == version and seen == {False, True}
    print(number, "deaths")


def kill_anytime(final):
    def forever():
        for version in range(1000, 10**9):
            publish(final, version)

    randomness = random.Random(1)
    seen = set()
    for _ in range(20):
        child = forked(forever)
        time.sleep(randomness.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        assert killed(os.waitpid(child, 0)[1])
        seen.add(check(final))
    assert len(seen) > 3


def kill(folder, how):
    final = folder / "checkpoint-7"
    if how == "aside":
        # A C library without renameat2.
        ctypes.CDLL = lambda *_, **__: types.SimpleNamespace()
    if how == "merge":
        final.mkdir()
        os.chdir(final)
    kill_everywhere(final, merge=how == "merge")
    if how != "merge":
        kill_anytime(final)


def message(function, *arguments):
    try:
        function(*arguments)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no error")


def fail(folder):
    (folder / "file").write_text("")
    publish(folder / "checkpoint-1", 1)
    add_foreign(folder / "checkpoint-1")

    def write_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        with Publication(folder / "checkpoint-1") as publication:
            (publication.content / "big").write_bytes(bytes(1 << 20))

    def write_as_nobody():
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        Publication(folder / "checkpoint-2")

    def tell(key, function, *arguments):
        print(json.dumps({key: message(function, *arguments)}), flush=True)

    tell("file", publish, folder / "file", 1)
    tell("below-file", publish, folder / "file" / "checkpoint-1", 1)
    for key, function in {"full": write_too_much, "forbidden": write_as_nobody}.items():
        assert os.waitpid(forked(tell, key, function), 0)[1] == 0
    os.chmod(folder, 0o755)
    assert check(folder / "checkpoint-1") == 1
    assert sorted(os.listdir(folder)) == ["checkpoint-1", "file"]


def one_rank_fails(final, error):
    with Publication(final) as publication:
        (publication.content / f"part-{dist.get_rank()}").write_text("")
        if dist.get_rank() == 1:
            raise error


def ranks(folder):
    dist.init_process_group("gloo")
    background = dist.new_group(backend="gloo")
    rank, size = world()
    messages = {}

    publish(folder / "checkpoint-1", 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    messages["one"] = message(one_rank_fails, folder / "checkpoint-1", full)
    messages["bug"] = message(one_rank_fails, folder / "checkpoint-1", KeyError("name"))
    messages["same"] = message(agree, CheckpointError("the file x is damaged."), "load")
    messages["nested"] = message(agree, CheckpointError(messages["one"]), "save")
    messages["two"] = message(agree, CheckpointError(f"reason {rank % 2}.") if rank else None, "load")
    messages["file"] = message(publish, folder / "checkpoint-1" / "config.json", 1)
    assert check(folder / "checkpoint-1", {}) == 1
    assert gather(rank, background) == list(range(size))

    (folder / "checkpoint-1" / "only-1.bin").write_text("2") if rank == 0 else None
    dist.barrier()
    messages["flipped"] = message(verify_files, folder / "checkpoint-1")
    dist.barrier()
    (folder / "checkpoint-1" / "config.json").write_text("") if rank == 0 else None
    dist.barrier()
    messages["cut"] = message(verify_files, folder / "checkpoint-1")

    # The main thread goes on with collectives of its own meanwhile.
    thread = threading.Thread(target=publish, args=(folder / "checkpoint-2", 2, background))
    thread.start()
    while any(gather(thread.is_alive())):
        dist.barrier()
    thread.join()
    assert check(folder / "checkpoint-2", {}) == 2
    print(json.dumps(messages), flush=True)
    leave()


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    {"kill": kill, "fail": fail, "ranks": ranks}[mode](Path(folder), *rest)
