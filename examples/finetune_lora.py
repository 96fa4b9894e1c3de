"""Trains a small Llama on bytes of text, then fine-tunes it by LoRA, with PipelineTrainer.

    python examples/finetune_lora.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py     one process per stage

First on the source code of Python's standard library, all weights, as a base; then on the package's
own documentation (``--data``: a file or folder of yours), adapters of its linear layers. Writes the
base, the adapter and the curves (loss.png) into ``--out``. Needs transformers, peft and matplotlib.
Set OMP_NUM_THREADS=1 if the stages share one machine.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from byte_text import load_text
from peft import LoraConfig, get_peft_model

from pipedream2bw.extras.transformers import PipelineTrainer

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"


class Rows(torch.utils.data.Dataset):
    """Pieces of a text, of so many bytes each, one after the other."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.pieces = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[number].long()
        return {"input_ids": tokens, "labels": tokens}  # the model shifts labels by itself


def build(options: argparse.Namespace) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        max_position_embeddings=options.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)  # the same weights on every rank
    return transformers.LlamaForCausalLM(config)


def train(
    model: torch.nn.Module,
    text: torch.Tensor,
    folder: Path,
    options: argparse.Namespace,
    **how: Any,
) -> tuple[list[tuple[int, float]], float, float]:
    """Trains the model and saves it; its losses by step, and those of held-out rows."""
    rows = Rows(text, options.context)
    held_out = min(64, len(rows) // 10)
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.rows,  # of a microbatch
        gradient_accumulation_steps=options.microbatches,
        max_steps=options.steps,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        logging_steps=5,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **how,
    )
    trainer = PipelineTrainer(
        model,
        args,
        train_dataset=torch.utils.data.Subset(rows, range(held_out, len(rows))),
        eval_dataset=torch.utils.data.Subset(rows, range(held_out)),
        pipeline={
            "num_stages": options.stages,
            "schedule": options.schedule,
            "dynamic_shapes": False,  # all rows have one length
        },
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    trainer.pipe.close()
    logs = [each for each in trainer.state.log_history if "loss" in each]
    return [(each["step"], each["loss"]) for each in logs], before, after


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a small language model by LoRA.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--data", type=Path, default=DOCUMENTS, help="text to fine-tune on")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--stages", type=int, default=max(2, world))
    parser.add_argument(
        "--schedule", default="2bw_fresh", choices=("2bw_fresh", "2bw", "1f1b", "gpipe")
    )
    for name, default in (("layers", 4), ("width", 128), ("context", 128), ("steps", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=2, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="per batch, and replica")
    options = parser.parse_args()

    base = build(options)
    curves: dict[str, list[tuple[int, float]]] = {}
    folder = options.out / "base"
    curves["base"], before, after = train(
        base, load_text(None), folder, options, learning_rate=2e-3
    )
    shown = [f"base: held-out loss: {before:.3f} -> {after:.3f}"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)  # the same adapters on every rank
    adapted, folder = get_peft_model(loaded, lora), options.out / "adapter"
    text = load_text(options.data)
    curves["LoRA"], before, after = train(adapted, text, folder, options, learning_rate=3e-3)
    shown.append(f"LoRA: held-out loss: {before:.3f} -> {after:.3f}")
    if int(os.environ.get("RANK", "0")) == 0:
        draw(curves, options.out / "loss.png")
        print("\n".join(shown), flush=True)


if __name__ == "__main__":
    main()
