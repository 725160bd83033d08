"""From a recipe's `data` to two lists of documents: to train on, and held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import FILE_BUILDERS, PYTHON_DOCS, Recipe
from expertmesh.finetune.values import refuse_unknown

TEXT_SUFFIXES = tuple(suffix for suffix, builder in FILE_BUILDERS.items() if builder == "text")


def load_documents(recipe: Recipe) -> tuple[Dataset, Dataset | None]:
    """The training documents and the held-out ones (None if `eval_fraction` is 0), each with the recipe's one column.

    The held-out documents are the last ones, so the same recipe always holds out the same.

    Raises:
        ConfigError: the data cannot be read, has no such column, another content, or too few documents.
    """
    column = recipe.messages_column or recipe.text_column
    documents = _load(recipe)
    refuse_unknown([column], documents.column_names, f"the data {recipe.data!r} (its columns are keys here)")
    documents = documents.select_columns([column]).filter(_has_content, input_columns=[column], desc="reading")
    _check_content(documents, column, chats=recipe.messages_column is not None)
    return _split(documents, recipe.eval_fraction)


def _load(recipe: Recipe) -> Dataset:
    data = str(recipe.data)
    if data == PYTHON_DOCS:
        return _texts(_python_docs(), recipe)
    path = Path(data)
    if path.is_dir() and (files := sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)):
        return _texts([file.read_text(encoding="utf-8") for file in files], recipe)
    builder = FILE_BUILDERS.get(path.suffix)
    try:
        if builder == "text":
            loaded = load_dataset("text", data_files=data, split="train", sample_by="paragraph")
            return loaded.rename_column("text", recipe.text_column) if recipe.text_column != "text" else loaded
        if builder is not None:
            return load_dataset(builder, data_files=data, split="train")
        return load_dataset(data, split=recipe.data_split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"data {data!r} cannot be loaded: {cause}") from error


def _texts(texts: Sequence[str], recipe: Recipe) -> Dataset:
    return Dataset.from_dict({recipe.text_column: list(texts)})


def _python_docs() -> list[str]:
    """The language reference that Python's `help()` shows: real prose that is on every machine."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _has_content(content: object) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def _check_content(documents: Dataset, column: str, chats: bool) -> None:
    """Look at the first document: all of a column have one type.

    Raises:
        ConfigError: no document at all, no text in a text column, or no chats in a messages column.
    """
    if not len(documents):
        raise ConfigError(f"column {column!r} of the data is empty: there is nothing to train on.")
    first = documents[0][column]
    if not chats and not isinstance(first, str):
        raise ConfigError(
            f"column {column!r} holds {type(first).__name__}, not text: set text_column, or messages_column for chats."
        )
    if chats and not (isinstance(first, list) and all(isinstance(turn, dict) and "role" in turn for turn in first)):
        raise ConfigError(f"column {column!r} holds no chats, which are lists of {{role: ..., content: ...}}.")


def _split(documents: Dataset, fraction: float) -> tuple[Dataset, Dataset | None]:
    if fraction == 0:
        return documents, None
    if len(documents) < 2:
        raise ConfigError(
            "the data is a single document, so none can be held out: set `eval_fraction: 0`, or split the text "
            "(paragraphs of a .txt file, files of a folder and rows of a table count as documents)."
        )
    held_out = min(max(round(len(documents) * fraction), 1), len(documents) - 1)
    first_held_out = len(documents) - held_out
    return documents.select(range(first_held_out)), documents.select(range(first_held_out, len(documents)))
