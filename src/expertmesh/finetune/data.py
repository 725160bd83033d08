"""From documents to rows of `input_ids`, `attention_mask` and `labels`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, default_data_collator

from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import Recipe

IGNORED = -100
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Row = dict[str, list[int]]


def build_rows(recipe: Recipe, documents: Dataset, tokenizer: PreTrainedTokenizerBase, name: str) -> Dataset:
    """The documents as rows of at most `sequence_length` tokens, with labels where there is something to learn.

    Packed documents follow each other, separated by the end token; attention is not cut between them.

    Args:
        recipe: the fine-tune.
        documents: one column of texts or chats.
        tokenizer: must have a chat template for chats.
        name: what the documents are called in an error, for instance `training`.

    Raises:
        ConfigError: not one row comes out.
    """
    (column,) = documents.column_names
    tokenize = _tokenize_chat if recipe.messages_column else _tokenize_text
    arguments = {"column": column, "tokenizer": tokenizer}
    rows = documents.map(tokenize, fn_kwargs=arguments, remove_columns=[column], desc=f"tokenizing {name} data")
    shape = _pack if recipe.packing else _cut
    cut = {"length": recipe.sequence_length}
    shaped = rows.map(shape, batched=True, fn_kwargs=cut, desc=f"cutting {name} data")
    learnable = shaped.filter(_has_labels, desc=f"checking {name} data")
    if not len(learnable):
        tokens = sum(len(ids) for ids in rows["input_ids"])
        raise ConfigError(
            f"the {name} data has {tokens} tokens in {len(documents)} documents, which make no sequence of "
            f"{recipe.sequence_length} tokens with something to learn: lower sequence_length"
            f"{', or change eval_fraction' if recipe.eval_fraction else ''}."
        )
    return learnable


def count_cut_documents(recipe: Recipe, rows: Dataset) -> int:
    """How many rows fill `sequence_length` to the last token, and so may have lost the rest of their document."""
    return 0 if recipe.packing else sum(len(ids) == recipe.sequence_length for ids in rows["input_ids"])


def collator(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[Any]], dict[str, Any]]:
    """Packed rows are equally long and only stacked; others are padded to the longest, their labels with -100."""
    return default_data_collator if recipe.packing else DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)


def can_mask_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the assistant's tokens (`{% generation %}`), so that only they are learned."""
    return bool(_GENERATION_MARK.search(tokenizer.chat_template or ""))


def _tokenize_text(document: dict[str, str], column: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    ids = tokenizer(document[column], verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    return {"input_ids": ids, "labels": ids}


def _tokenize_chat(document: dict[str, Any], column: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    masked = can_mask_chats(tokenizer)
    chat = tokenizer.apply_chat_template(document[column], return_dict=True, return_assistant_tokens_mask=masked)
    ids = chat["input_ids"]
    learned = chat["assistant_masks"] if masked else [1] * len(ids)
    return {
        "input_ids": ids,
        "labels": [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)],
    }


def _pack(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Join a batch of rows and cut it into full sequences; the remainder of each batch is left out."""
    joined = {name: list(chain.from_iterable(rows[name])) for name in ("input_ids", "labels")}
    starts = range(0, len(joined["input_ids"]) - length + 1, length)
    packed = {name: [values[start : start + length] for start in starts] for name, values in joined.items()}
    return {**packed, "attention_mask": [[1] * length for _ in starts]}


def _cut(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    cut = {name: [values[:length] for values in rows[name]] for name in ("input_ids", "labels")}
    return {**cut, "attention_mask": [[1] * len(ids) for ids in cut["input_ids"]]}


def _has_labels(row: Row) -> bool:
    """The first token is never predicted, so its label does not count."""
    return any(label != IGNORED for label in row["labels"][1:])
