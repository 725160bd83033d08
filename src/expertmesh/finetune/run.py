"""The fine-tune itself, on `transformers.Trainer`. Nothing here knows how many ranks there are or what they share."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import datasets
import torch
import transformers
from datasets import Dataset
from peft import PeftModel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from expertmesh.errors import ConfigError
from expertmesh.finetune.data import build_rows, can_mask_chats, collator, count_cut_documents
from expertmesh.finetune.documents import load_documents
from expertmesh.finetune.export import check_in_stock_process, reader, save_finished
from expertmesh.finetune.model import build_config, build_model
from expertmesh.finetune.perplexity import IGNORED_OUTPUTS, likelihood_per_sequence, perplexity
from expertmesh.finetune.progress import FinetuneProgress, held_out_perplexities
from expertmesh.finetune.recipe import NONE, Recipe
from expertmesh.finetune.resume import checkpoint_to_resume, discard_checkpoints, parallelism_of, removed_if_empty
from expertmesh.finetune.tokenizer import build_tokenizer


def finetune(recipe: Recipe) -> None:
    """Train, write the model or its adapters to `output_dir`, and show what it learned. Call it on every rank.

    Raises:
        ConfigError: the recipe cannot work; nothing was written.
        ModelError: the written model does not reload in stock Transformers.
    """
    started = time.monotonic()
    arguments = training_arguments(recipe)
    is_main = arguments.process_index == 0
    quieten(is_main)
    with removed_if_empty(recipe.output_path) if is_main else nullcontext():
        checkpoint = checkpoint_to_resume(recipe)
        # Where a resumed run began, it has measured already.
        arguments.eval_on_start = recipe.eval_fraction > 0 and checkpoint is None
        trainer = build_trainer(recipe, arguments)
        if is_main and recipe.resume == NONE:
            discard_checkpoints(recipe.output_path)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        if recipe.eval_fraction and trainer.state.global_step not in held_out_perplexities(trainer.state):
            trainer.evaluate(ignore_keys=IGNORED_OUTPUTS)
        save(recipe, trainer)
    if is_main:
        report(recipe, trainer.state, check_in_stock_process(recipe), time.monotonic() - started)


def quieten(is_main: bool) -> None:
    """Leave the screen to our own report: no hints about defaults, and library bars only where they can be drawn."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not (is_main and sys.stderr.isatty()):
        datasets.disable_progress_bars()


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """The recipe in Trainer's words. Starts the process group, if a launcher asks for one."""
    return TrainingArguments(
        output_dir=str(recipe.output_path),
        per_device_train_batch_size=recipe.per_device_batch_size,
        per_device_eval_batch_size=recipe.per_device_batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.lr_schedule,
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps or -1,
        seed=recipe.seed,
        use_cpu=not torch.accelerator.is_available(),
        bf16=recipe.mixed_precision == "bf16",
        activation_checkpointing=recipe.activation_checkpointing,
        logging_steps=recipe.logging_steps,
        eval_strategy="steps" if recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps,
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or 0,
        save_total_limit=recipe.save_total_limit,
        parallelism_config=parallelism_of(recipe),
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        # Over all ranks. Packed rows have no padding, so Trainer need not look for it.
        include_num_input_tokens_seen="all" if recipe.packing else "non_padding",
    )


def build_trainer(recipe: Recipe, arguments: TrainingArguments) -> Trainer:
    """Everything that can be refused comes first, the weights last.

    Raises:
        ConfigError: the data, the tokenizer or the model's configuration do not fit the recipe or each other, or the
            launch asks for an engine whose weights cannot be saved from where they are.
    """
    tokenizer, train, held_out = build_data(recipe, arguments)
    config = build_config(recipe, tokenizer)
    model = build_model(recipe, config)
    if arguments.process_index == 0:
        describe(recipe, model, tokenizer, train, held_out)
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=collator(recipe, tokenizer),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=perplexity,
        preprocess_logits_for_metrics=likelihood_per_sequence,
        callbacks=[FinetuneProgress()],
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise ConfigError("finetune trains with FSDP2, not with FSDP1 or DeepSpeed: set `fsdp_version: 2`.")
    return trainer


def build_data(recipe: Recipe, arguments: TrainingArguments) -> tuple[PreTrainedTokenizerBase, Dataset, Dataset | None]:
    """The tokenizer, the training rows and the held-out rows (None without `eval_fraction`).

    Rank 0 goes first, so that the others find its results in the cache of `datasets`.

    Raises:
        ConfigError: the data or the tokenizer cannot be used as the recipe wants.
    """
    with arguments.main_process_first(desc="documents"):
        documents, held_out_documents = load_documents(recipe)
    tokenizer = build_tokenizer(recipe, documents)
    with arguments.main_process_first(desc="rows"):
        train = build_rows(recipe, documents, tokenizer, "training")
        held_out = held_out_documents and build_rows(recipe, held_out_documents, tokenizer, "held-out")
    return tokenizer, train, held_out


def save(recipe: Recipe, trainer: Trainer) -> None:
    """Write the finished model. Afterwards the ranks need each other no more. Collective."""
    accelerator = trainer.accelerator
    model = accelerator.unwrap_model(trainer.model_wrapped)
    # Trainer turned the cache off for training; the saved model is for generating.
    model.config.use_cache = True
    save_finished(recipe, model, trainer.processing_class)
    # A rank must not exit right behind a collective: gloo's threads may still hold its tensors (pytorch#179291).
    accelerator.wait_for_everyone()
    accelerator.end_training()


def describe(
    recipe: Recipe,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset | None,
) -> None:
    """Say what will be trained on what, and what the user may not expect."""
    size = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kind = type(model.get_base_model() if recipe.lora else model).__name__
    adapters = f", {trained / 1e6:,.3g} M of them trained" if recipe.lora else ""
    print(f"{kind}, {size / 1e6:,.1f} M parameters{adapters}, vocabulary {len(tokenizer)}")
    print(
        f"{len(train):,} sequences to train on, {len(held_out or ()):,} held out, {recipe.sequence_length} tokens each"
    )
    if cut := count_cut_documents(recipe, train):
        print(f"note: {cut:,} documents reach sequence_length and may have been cut")
    if recipe.messages_column and not can_mask_chats(tokenizer):
        print("note: the chat template has no {% generation %} marks, so the loss is on all turns, not the assistant's")


def report(recipe: Recipe, state: TrainerState, sample: str, seconds: float) -> None:
    """The closing lines of a fine-tune."""
    held_out = list(held_out_perplexities(state).values())
    if held_out:
        print(f"held-out perplexity: {held_out[0]:.2f} before, {held_out[-1]:.2f} after")
    print(
        f"saved to {recipe.output_dir}, {seconds:.0f} s in all; reloaded by stock {reader(recipe)}, it says:\n{sample}"
    )
