"""`python -m expertmesh.finetune`, alone or under `accelerate launch`."""

from __future__ import annotations

import sys

from expertmesh.errors import install_one_line_reports
from expertmesh.finetune.arguments import help_text, read_recipe, wants_help


def main() -> None:
    """Read the recipe, then import the libraries and train: a refusal takes no time."""
    install_one_line_reports()
    if wants_help(sys.argv[1:]):
        print(help_text())
        return
    recipe = read_recipe(sys.argv[1:])
    from expertmesh.finetune.run import finetune

    finetune(recipe)


if __name__ == "__main__":
    main()
