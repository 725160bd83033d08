"""`python -m expertmesh.finetune`, killed without notice on every rank once so many steps are done.

usage: killed_finetune.py STEPS RECIPE.yaml [--key value ...]
"""

import os
import signal
import sys

from transformers import Trainer

from expertmesh.finetune.__main__ import main

steps = int(sys.argv.pop(1))
training_step = Trainer.training_step


def step_or_die(self, *args, **kwargs):
    if self.state.global_step == steps:
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(self, *args, **kwargs)


Trainer.training_step = step_or_die
main()
