"""The tokenizer of a fine-tune: loaded, or trained on the training text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from expertmesh.errors import ConfigError
from expertmesh.finetune.recipe import Recipe

END_OF_TEXT, PAD, TURN, END_OF_TURN = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"

# ChatML. The `generation` marks say which tokens are the assistant's, so that only those are learned.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(recipe: Recipe, documents: Dataset) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer, the same on every rank, with a pad token if rows will be padded.

    Call it on every rank once the process group exists: rank 0 trains, the others receive.

    Raises:
        ConfigError: it cannot be loaded, has no chat template for chats, or has no token that could pad.
    """
    chats = recipe.messages_column is not None
    if isinstance(recipe.tokenizer, dict):
        tokenizer = _train(documents, recipe.tokenizer["train_bpe"], chats)
    else:
        tokenizer = _load(recipe.tokenizer or str(recipe.model))
    if recipe.chat_template is not None:
        tokenizer.chat_template = Path(recipe.chat_template).read_text(encoding="utf-8")
    if chats and tokenizer.chat_template is None:
        raise ConfigError("the tokenizer has no chat template: give a Jinja file as `chat_template`.")
    if not recipe.packing and tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError("the tokenizer has neither a pad nor an end token: set `packing: true`.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def _train(documents: Dataset, size: int, chats: bool) -> PreTrainedTokenizerBase:
    """A byte-level BPE; `size` is an upper limit, a short text yields fewer tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, PAD, TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    # Whether ties between merges fall alike on every rank is not ours to trust: all take rank 0's.
    serialized = [tokenizer.to_str()]
    if dist.is_initialized():
        dist.broadcast_object_list(serialized, src=0)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(serialized[0]),
        eos_token=END_OF_TURN if chats else END_OF_TEXT,
        pad_token=PAD,
        chat_template=CHATML if chats else None,
    )


def _texts(documents: Dataset) -> Iterator[str]:
    (column,) = documents.column_names
    for document in documents:
        content = document[column]
        if isinstance(content, str):
            yield content
        else:
            yield from (turn["content"] for turn in content)
