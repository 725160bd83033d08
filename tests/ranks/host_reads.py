"""What makes the host wait for an accelerator, counted without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

READS = ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero", "cpu", "numpy", "masked_select", "unique")


@contextmanager
def host_reads(engine_files: str = "nowhere") -> Iterator[list[str]]:
    """Note every read while the block runs, also inside of operators: `<method> in <file>`.

    Args:
        engine_files: a folder whose files stand for an engine; what they read is the engine's own affair.
    """
    seen: list[str] = []
    with ExitStack() as stack:
        for name in READS:
            original = getattr(torch.Tensor, name)

            def counting(self, *args, _name=name, _original=original, **kwargs):
                reader = sys._getframe(1)
                if not _is_called_from(engine_files):
                    seen.append(f"{_name} in {Path(reader.f_code.co_filename).name}")
                return _original(self, *args, **kwargs)

            stack.enter_context(patch.object(torch.Tensor, name, counting))
        yield seen


def _is_called_from(folder: str) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if Path(frame.f_code.co_filename).parent.name == folder:
            return True
        frame = frame.f_back
    return False
