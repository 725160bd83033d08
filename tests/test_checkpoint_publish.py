"""A checkpoint is there as a whole or not at all, whenever a process is killed and whatever fails."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from processes import TESTS, run_command, run_ranks

from expertmesh.checkpoint.manifest import MANIFEST, Manifest, describe_files
from expertmesh.checkpoint.publish import Publication, incomplete, latest, resolve
from expertmesh.errors import CheckpointError

PROGRAM = TESTS / "ranks" / "publishing.py"


@pytest.fixture
def memory_folder():
    """A folder in memory where there is one: thousands of fsyncs cost nothing there, and their order is the same."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("how", ["exchange", "aside", "merge"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(how, memory_folder):
    finished = run_command([sys.executable, PROGRAM, "kill", memory_folder, how], timeout=500)
    assert finished.returncode == 0, finished.output
    assert int(finished.stdout.split()[0]) > 20


def test_what_cannot_be_written_is_said_in_one_line(tmp_path):
    finished = run_command([sys.executable, PROGRAM, "fail", tmp_path])
    assert finished.returncode == 0, finished.output
    messages = {key: text for line in finished.stdout.splitlines() for key, text in json.loads(line).items()}
    for key, (reason, remedy) in {
        "file": ("file", "move it away"),
        "below-file": ("file", "move it away"),
        "full": ("File too large", "Free some space"),
        "forbidden": ("Permission denied", "right to write"),
    }.items():
        assert reason in messages[key] and remedy in messages[key] and str(tmp_path) in messages[key]
        assert "\n" not in messages[key]


def test_ranks_fail_together_and_a_background_group_publishes(tmp_path):
    first, *others = (json.loads(rank.stdout.splitlines()[-1]) for rank in run_ranks(PROGRAM, 3, "ranks", tmp_path))
    assert all(other == first for other in others)
    assert "No space left on device" in first["one"] and first["one"].endswith("[rank 1 of 3]")
    assert "KeyError: 'name'" in first["bug"]
    assert first["same"] == "the file x is damaged."
    assert first["nested"] == first["one"]
    assert first["two"] == "cannot load: reason 1. [rank 1 of 3]; reason 0. [rank 2 of 3]"
    assert "config.json" in first["file"]
    assert "only-1.bin" in first["flipped"] and "checksum" in first["flipped"]
    assert "config.json has 0 bytes instead of 1" in first["cut"]


def written(folder, step=1):
    folder.mkdir()
    (folder / "state.bin").write_bytes(b"state")
    Manifest(step=step, files=describe_files(folder)).write(folder)
    return folder


def test_latest_is_the_newest_complete_one(tmp_path):
    assert latest(tmp_path) is None
    for step in (5, 10, 20, 100):
        written(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-100" / "state.bin").write_bytes(b"sta")
    (tmp_path / "checkpoint-20" / MANIFEST).unlink()
    written(tmp_path / "checkpoint-200.partial")
    (tmp_path / "checkpoint-best").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    assert incomplete(tmp_path) == [tmp_path / "checkpoint-200.partial"]
    # Killed between the two renames of a file system that cannot exchange.
    (tmp_path / "checkpoint-10").rename(tmp_path / "checkpoint-10.replaced")
    assert latest(tmp_path) == resolve(tmp_path / "checkpoint-10") == tmp_path / "checkpoint-10.replaced"


def test_inner_folder_becomes_the_final_one(tmp_path):
    with Publication(tmp_path / "out" / "checkpoint-3", inner="checkpoint-3") as publication:
        assert publication.folder == tmp_path / "out" / "checkpoint-3.partial"
        written(publication.folder / "checkpoint-3", 3)
    assert os.listdir(tmp_path / "out") == ["checkpoint-3"]
    assert Manifest.read(tmp_path / "out" / "checkpoint-3").step == 3


def test_foreign_files_stay_and_parts_of_an_old_model_go(tmp_path):
    final = tmp_path / "model"
    (final / "checkpoint-1").mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.bin", "notes.md", "checkpoint-1/model.safetensors"):
        (final / name).write_text(name)
    (final / "link").symlink_to("notes.md")
    inode = (final / "notes.md").stat().st_ino
    with Publication(final) as publication:
        (publication.content / "model-00001-of-00001.safetensors").write_text("new")
    there = {path.relative_to(final).as_posix() for path in final.rglob("*") if not path.is_dir()}
    assert there == {"model-00001-of-00001.safetensors", "notes.md", "link", "checkpoint-1/model.safetensors"}
    assert (final / "notes.md").stat().st_ino == inode, "not copied"
    assert (final / "link").is_symlink()


def test_a_failed_block_publishes_nothing(tmp_path):
    final = written(tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointError, match="ZeroDivisionError"), Publication(final) as publication:
        (publication.content / "state.bin").write_text("half")
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), Publication(final):
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="nothing was written"), Publication(final, inner="x"):
        pass
    assert os.listdir(tmp_path) == ["checkpoint-1"] and (final / "state.bin").read_bytes() == b"state"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format_version": 2}', "upgrade expertmesh"),
        ('{"format_version": 1}', "damaged"),
        (
            '{"format_version": 1, "versions": {}, "mesh": {}, "step": 1, "tensors": {}, '
            '"files": {"../x": {"size": 1, "crc32": null}}}',
            "outside its folder",
        ),
    ],
)
def test_a_damaged_or_newer_manifest_is_refused(content, expected, tmp_path):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=expected):
        Manifest.read(tmp_path)
