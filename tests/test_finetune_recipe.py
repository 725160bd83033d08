"""Reading a recipe: defaults, YAML, overrides, and every refusal."""

from __future__ import annotations

import pytest
import yaml
from processes import ROOT

from expertmesh.errors import ConfigError
from expertmesh.finetune.arguments import explained_keys, help_text, read_recipe

GOOD = {
    "model_config": {"model_type": "qwen3_moe", "num_experts": 8},
    "tokenizer": {"train_bpe": 512},
    "data": "python-docs",
}


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**GOOD, "output_dir": str(tmp_path / "out")}))
    return str(path)


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recipe(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_yaml_file_and_overrides_in_both_spellings(recipe_file):
    recipe = read_recipe(
        [recipe_file, "--max_steps", "7", "--learning-rate=1e-4", "--model_config.num_experts", "4", "--packing", "no"]
    )
    assert (recipe.max_steps, recipe.learning_rate, recipe.packing) == (7, 1e-4, False)
    assert recipe.model_config == {"model_type": "qwen3_moe", "num_experts": 4}
    assert recipe.sequence_length == 1024


def test_the_command_line_alone_is_enough(tmp_path):
    recipe = read_recipe(["--model", "m", "--data", "python-docs", "--output_dir", str(tmp_path / "out")])
    assert (recipe.model, recipe.tokenizer) == ("m", None)


def test_scientific_notation_without_a_dot_is_a_number_in_the_file_too(recipe_file):
    # YAML 1.1 reads 1e-4 as a text.
    with open(recipe_file, "a") as file:
        file.write("learning_rate: 1e-4\n")
    assert read_recipe([recipe_file]).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (("--learning_rat", "1"), "did you mean `learning_rate`?"),
        (("--learning_rate", "fast"), "learning_rate must be float"),
        (("--learning_rate", "nan"), "learning_rate must be float"),
        (("--max_steps", "1.5"), "max_steps must be int or nothing"),
        (("--max_steps", "true"), "max_steps must be int or nothing"),
        (("--packing", "1"), "packing must be bool"),
        (("--max_steps", "0"), "max_steps must be at least 1"),
        (("--weight_decay", "-0.1"), "weight_decay must not be negative"),
        (("--epochs", "0"), "epochs must be more than 0"),
        (("--eval_fraction", "1.0"), "eval_fraction must be at least 0 and less than 1"),
        (("--eval_fraction", "0", "--eval_steps", "5"), "eval_steps needs held-out documents"),
        (("--save_steps", "0"), "save_steps must be at least 1"),
        (("--save_total_limit", "2"), "set save_steps"),
        (("--save_async", "true"), "set save_steps"),
        (("--resume", "nowhere"), "there is no checkpoint 'nowhere'"),
        (("--dtype", "int8"), "choose among float32, bfloat16"),
        (("--lr_schedule", "cosin"), "choose among linear, cosine"),
        (("--model", "somewhere"), "exactly one of `model`"),
        (("--model_config", "null"), "exactly one of `model`"),
        (("--model_config", "{num_experts: 4}"), "needs a model_type"),
        (("--tokenizer", "null"), "has no tokenizer of its own"),
        (("--tokenizer", "{train_bpe: 10}"), "at least 300"),
        (("--tokenizer", "{train_bp: 512}"), "is not understood"),
        (("--data", "null"), "`data` is missing"),
        (("--data", "nowhere.jsonl"), "there is no file 'nowhere.jsonl'"),
        (("--chat_template", "nowhere"), "there is no file 'nowhere'"),
        (("--messages_column", "messages"), "python-docs has no chats"),
        (("--output_dir", "null"), "`output_dir` is missing"),
        (("--output_dir", "s3://bucket/model"), "is a URL"),
        (("--data.name", "x"), "has no entries"),
        (("--data", "[unclosed"), "--data is not valid YAML"),
        (("--seed",), "--seed has no value"),
        (("other.yaml",), "two recipes were given"),
    ],
)
def test_refusals_name_the_key_and_the_remedy(recipe_file, override, expected):
    assert expected in refusal(recipe_file, *override)


def test_a_missing_or_shapeless_recipe_is_refused(tmp_path):
    assert "there is no recipe" in refusal(str(tmp_path / "none.yaml"))
    shapeless = tmp_path / "list.yaml"
    shapeless.write_text("- 1")
    assert "is not a mapping" in refusal(str(shapeless))


def test_only_a_model_is_ever_overwritten(recipe_file, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    read_recipe([recipe_file])
    (output / "notes.txt").write_text("mine")
    assert "is not empty" in refusal(recipe_file)
    assert "holds something else than a model" in refusal(recipe_file, "--overwrite", "true")
    (output / "config.json").write_text("{}")
    assert read_recipe([recipe_file, "--overwrite", "true"]).overwrite


def test_earlier_checkpoints_are_gone_on_from_or_given_up_explicitly(recipe_file, tmp_path):
    checkpoint = tmp_path / "out" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    assert "holds checkpoints: set `resume: auto`" in refusal(recipe_file)
    for go_on in ("auto", str(checkpoint)):
        assert read_recipe([recipe_file, "--resume", go_on]).resume == go_on
    assert read_recipe([recipe_file, "--overwrite", "true"]).resume == "none"
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "is not empty" in refusal(recipe_file, "--resume", "auto")
    assert read_recipe([recipe_file, "--resume", "auto", "--overwrite", "true"]).resume == "auto"


def test_help_and_the_guide_list_every_key():
    guide = (ROOT / "docs" / "finetune.md").read_text()
    for key, explanation, _ in explained_keys():
        assert explanation in help_text()
        assert f"| `{key}` |" in guide


def test_the_shipped_recipes_are_valid(tmp_path):
    for recipe in (ROOT / "launch_configs").glob("*.yaml"):
        if "output_dir" in recipe.read_text():
            read_recipe([str(recipe), "--output_dir", str(tmp_path / "out")])
