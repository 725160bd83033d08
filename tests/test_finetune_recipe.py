"""Reading a recipe: defaults, YAML, overrides, and every refusal."""

from __future__ import annotations

import re

import pytest
import yaml
from processes import ROOT
from ranks.models import build

from expertmesh.errors import ConfigError, ExpertMeshError
from expertmesh.finetune.adapters import adapt, peft_config
from expertmesh.finetune.arguments import explained_keys, help_text, read_recipe
from expertmesh.finetune.lora import LoraRecipe

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
        (("--lora", "{}"), "lora adapts a pretrained `model`"),
        (("--lora", "true"), "lora must be dict or nothing"),
        (("--lora.lora_alpha", "8"), "'lora_alpha' is not a key of `lora`: did you mean `alpha`?"),
        (("--lora.r", "0"), "lora.r must be at least 1"),
        (("--lora.r", "8.5"), "lora.r must be int"),
        (("--lora.alpha", "0"), "lora.alpha must be at least 1"),
        (("--lora.dropout", "1"), "lora.dropout must be at least 0 and less than 1"),
        (("--lora.dropout", "0.1"), "set `dropout: 0`, or set `targets: [attention]`"),
        (("--lora.use_dora", "true"), "lora.use_dora works for linear layers only, not for experts"),
        (("--lora", "{dropout: 0.1, target_parameters: [a]}"), "or drop target_parameters"),
        (("--lora.targets", "[attention, mlp]"), "lora.targets 'mlp' is unknown: choose among attention, experts"),
        (("--lora.targets", "[]"), "lora.targets must be a list of names"),
        (("--lora.target_modules", "[1]"), "lora.target_modules must be a list of names"),
        (("--lora", "{targets: [experts], target_modules: [q_proj]}"), "say the same thing: remove one"),
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


def test_adapters_have_defaults_and_may_be_set_one_by_one(recipe_file):
    pretrained = ("--model", "m", "--model_config", "null", "--tokenizer", "null")
    assert read_recipe([recipe_file, *pretrained]).lora is None
    lora = read_recipe([recipe_file, *pretrained, "--lora", "{}"]).lora
    assert (lora.r, lora.scaled_by, lora.targets) == (16, 32, None)
    options = ("--lora.r", "8", "--lora.targets", "[attention]", "--lora.dropout", "0.1", "--lora.use_dora", "yes")
    lora = read_recipe([recipe_file, *pretrained, *options]).lora
    assert lora == LoraRecipe(r=8, targets=["attention"], dropout=0.1, use_dora=True)


SHARED = "shared_experts"
SELF_ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("family", "attention", "parameters"),
    [
        ("qwen3_moe", SELF_ATTENTION, {"experts.gate_up_proj", "experts.down_proj", "gate.weight"}),
        (
            "nemotron_h",
            {f"mixer.{name}_proj" for name in "qkvo"},
            {"experts.up_proj", "experts.down_proj", "gate.weight"}
            | {f"{SHARED}.{name}_proj.weight" for name in ("up", "down")},
        ),
        (
            "glm4_moe",
            SELF_ATTENTION,
            {"experts.gate_up_proj", "experts.down_proj", "gate.weight"}
            | {f"{SHARED}.{name}_proj.weight" for name in ("gate", "up", "down")},
        ),
    ],
)
def test_targets_are_found_in_every_family(family, attention, parameters):
    model = build(family)
    default = peft_config(model, LoraRecipe())
    assert set(default.target_modules) == attention
    assert set(default.target_parameters) == {name for name in parameters if name.startswith("experts.")}
    has_shared = any(name.startswith(SHARED) for name in parameters)
    targets = ["attention", "experts", "router", *([SHARED] if has_shared else [])]
    every = LoraRecipe(targets=targets)
    config = peft_config(model, every)
    assert (set(config.target_modules), set(config.target_parameters)) == (attention, parameters)
    adapt(model, every)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraRecipe(targets=[SHARED]), "Qwen3MoeForCausalLM has no shared_experts"),
        (LoraRecipe(target_modules=["q_pro"]), "PEFT cannot adapt Qwen3MoeForCausalLM: Target modules"),
        (LoraRecipe(target_modules=["gate_proj"]), "without also targeting up_proj"),
        (LoraRecipe(target_modules=["q_proj"], target_parameters=["experts.up"]), "`experts.up` matches no parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning")
def test_adapters_that_do_not_fit_the_model_are_refused_in_one_line(lora, message):
    with pytest.raises(ExpertMeshError, match=re.escape(message)) as caught:
        adapt(build(), lora)
    assert "\n" not in str(caught.value)


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
    for config in ("config.json", "adapter_config.json"):
        (output / config).write_text("{}")
        assert read_recipe([recipe_file, "--overwrite", "true"]).overwrite
        (output / config).unlink()


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
