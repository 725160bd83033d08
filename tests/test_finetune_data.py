"""From files to rows: formats, the held-out tail, packing against padding, and which tokens are learned."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

from expertmesh.errors import ConfigError
from expertmesh.finetune.data import IGNORED, build_rows, can_mask_chats, collator, count_cut_documents
from expertmesh.finetune.documents import load_documents
from expertmesh.finetune.recipe import Recipe
from expertmesh.finetune.tokenizer import CHATML, build_tokenizer

TEXTS = [f"Document {number} says that {number} follows {number - 1}." for number in range(1, 21)]
CHATS = [
    [
        {"role": "user", "content": f"What follows {number}?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome"},
    ]
    for number in range(10)
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def recipe(**keys) -> Recipe:
    return Recipe(**{"tokenizer": {"train_bpe": 400}, "sequence_length": 16, "eval_fraction": 0.1, **keys})


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))


@pytest.mark.parametrize("kind", ["txt", "md", "folder", "jsonl", "json", "parquet"])
def test_every_format_gives_the_same_documents(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind in ("txt", "md"):
        path.write_text("\n\n".join(TEXTS))
    elif kind == "folder":
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number:02}.txt").write_text(text)
    elif kind == "jsonl":
        write_jsonl(path, [{"text": text, "other": 1} for text in TEXTS])
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    else:
        Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    train, held_out = load_documents(recipe(data=str(path)))
    assert train.column_names == ["text"]
    assert [text.strip() for text in train["text"]] == TEXTS[:18]
    assert [text.strip() for text in held_out["text"]] == TEXTS[18:]


def test_python_docs_is_prose_and_splits_alike_every_time():
    first, second = (load_documents(recipe(data="python-docs")) for _ in range(2))
    assert len(first[0]) + len(first[1]) > 50
    assert list(first[1]["text"]) == list(second[1]["text"])


def test_nothing_is_held_out_without_a_fraction(tmp_path):
    (tmp_path / "a.txt").write_text("just one")
    train, held_out = load_documents(recipe(data=str(tmp_path / "a.txt"), eval_fraction=0.0))
    assert (len(train), held_out) == (1, None)


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        ([{"txt": "a"}], {}, "did you mean `txt`?"),
        ([{"text": 1}], {}, "holds int, not text"),
        ([{"text": "  "}], {}, "is empty"),
        ([{"text": "alone"}], {}, "single document"),
        ([{"text": "a"}, {"text": "b"}], {"messages_column": "text"}, "holds no chats"),
        ([{"text": CHATS[0]}], {}, "messages_column for chats"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path, rows, keys, expected):
    write_jsonl(tmp_path / "data.jsonl", rows)
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        load_documents(recipe(data=str(tmp_path / "data.jsonl"), **keys))


def test_broken_json_is_refused(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": ')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_documents(recipe(data=str(tmp_path / "data.jsonl")))


def test_packed_rows_are_full_and_keep_every_token_in_order():
    documents = Dataset.from_dict({"text": TEXTS})
    packed = recipe()
    tokenizer = build_tokenizer(packed, documents)
    rows = build_rows(packed, documents, tokenizer, "training")
    expected = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    got = [token for ids in rows["input_ids"] for token in ids]
    assert got == expected[: len(got)] and len(expected) - len(got) < 16
    batch = collator(packed, tokenizer)([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 16)
    assert (batch["labels"] == batch["input_ids"]).all() and batch["attention_mask"].all()


def test_padded_rows_learn_no_padding_but_do_learn_the_end():
    documents = Dataset.from_dict({"text": ["one", "a much longer document that has to be cut somewhere"] * 2})
    padded = recipe(packing=False, sequence_length=8)
    tokenizer = build_tokenizer(padded, documents)
    tokenizer.pad_token = tokenizer.eos_token  # the common case that tempts a collator to mask the end as well
    rows = build_rows(padded, documents, tokenizer, "training")
    assert count_cut_documents(padded, rows) == 2
    batch = collator(padded, tokenizer)([rows[0], rows[1]])
    length = len(rows[0]["input_ids"])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"][0, length - 1] == tokenizer.eos_token_id
    assert (batch["labels"][0, length:] == IGNORED).all() and not batch["attention_mask"][0, length:].any()
    assert (batch["labels"][1] == batch["input_ids"][1]).all()


def test_only_what_the_assistant_says_is_learned():
    documents = Dataset.from_dict({"messages": CHATS})
    chats = recipe(messages_column="messages", packing=False, sequence_length=256)
    tokenizer = build_tokenizer(chats, documents)
    rows = build_rows(chats, documents, tokenizer, "training")
    learned = tokenizer.decode([label for label in rows[3]["labels"] if label != IGNORED])
    assert learned == "It is 4.<|im_end|>Welcome<|im_end|>"
    assert tokenizer.decode(rows[3]["input_ids"]).startswith("<|im_start|>user\nWhat follows 3?<|im_end|>\n")


def test_a_template_without_marks_learns_everything(tmp_path):
    plain = tmp_path / "plain.jinja"
    plain.write_text(CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    documents = Dataset.from_dict({"messages": CHATS})
    chats = recipe(messages_column="messages", packing=False, sequence_length=256, chat_template=str(plain))
    tokenizer = build_tokenizer(chats, documents)
    rows = build_rows(chats, documents, tokenizer, "training")
    assert not can_mask_chats(tokenizer)
    assert rows[0]["labels"] == rows[0]["input_ids"]


def test_too_long_a_sequence_length_is_refused():
    documents = Dataset.from_dict({"text": TEXTS})
    long = recipe(sequence_length=100_000)
    with pytest.raises(ConfigError, match="lower sequence_length"):
        build_rows(long, documents, build_tokenizer(long, documents), "training")
