"""Tiny models of transformers, with data, for Trainers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

VOCABULARY = 61
LABELS = 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PADDING = 0

Row = dict[str, torch.Tensor]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, intermediate_size=32, **SIZES)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """With tied weights."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    """With its balance loss."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        intermediate_size=32,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        **SIZES,
    )
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, intermediate_size=32, num_labels=LABELS, **NO_DROPOUT, **SIZES
    )
    return transformers.BertForSequenceClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=LABELS,
        **NO_DROPOUT,
        **SIZES,
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def lora() -> nn.Module:
    """A model of which adapters alone are trained."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which begins as zeros, so that lora_A would have no gradient
            nn.init.normal_(parameter, std=0.1)
    return model


def text(number: int) -> Row:
    """A row of text, of its own length."""
    ids = torch.randint(2, VOCABULARY, (5 + number % 4,))
    return {"input_ids": ids, "labels": ids.clone()}


def sentence(number: int) -> Row:
    return {"input_ids": text(number)["input_ids"], "labels": torch.randint(LABELS, ())}


def translation(number: int) -> Row:
    return {"input_ids": text(number)["input_ids"], "labels": text(number + 1)["labels"]}


def image(number: int) -> Row:
    return {"pixel_values": torch.randn(3, 16, 16), "labels": torch.randint(LABELS, ())}


def collate(rows: list[Row]) -> Row:
    """Pads rows to the longest one: inputs with a mask, labels with what no loss counts."""
    batch: Row = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "input_ids":
            mask = [torch.ones_like(value) for value in values]
            batch["attention_mask"] = nn.utils.rnn.pad_sequence(mask, batch_first=True)
        if values[0].dim() == 1:
            filler = -100 if name == "labels" else PADDING
            batch[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)
        else:
            batch[name] = torch.stack(values)
    return batch


@dataclasses.dataclass(frozen=True)
class TrainerTask:
    """A model and its data, the same at each call."""

    build: Callable[[], nn.Module]
    row: Callable[[int], Row]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def data(self, rows: int, seed: int = 1) -> list[Row]:
        torch.manual_seed(seed)
        return [self.row(number) for number in range(rows)]

    def arguments(self, folder: Any, **others: Any) -> dict[str, Any]:
        """What a Trainer is given: six steps of four microbatches, fewer at an epoch's end."""
        options = {
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 2,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            **others,
        }
        return {
            "args": transformers.TrainingArguments(str(folder), **options),
            "train_dataset": self.data(21),
            "eval_dataset": self.data(10, seed=2),
            "data_collator": collate,
        }


TASKS = {
    "llama": TrainerTask(llama, text),
    "gpt2": TrainerTask(gpt2, text),
    "mixtral": TrainerTask(mixtral, text),
    "bert": TrainerTask(bert, sentence),
    "vit": TrainerTask(vit, image),
    "t5": TrainerTask(t5, translation),
    "lora": TrainerTask(lora, text),
}
