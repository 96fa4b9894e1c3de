"""A Trainer of transformers whose model is a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

import pipedream2bw as pd2

from .arguments import check_model, obeyed
from .calls import NUMBER, Calls, LossesToCome
from .computed import EvaluatedBatches, prepare_for_capture
from .folders import newest_whole, remove_other_runs, state_in
from .replicas import ReplicaAccelerator, Sharing, first_batch, generators_kept, step_only


class PipelineTrainer(Trainer):
    """A ``transformers.Trainer`` that trains its model as a pipeline.

    It takes the place of ``Trainer(...)``, with one argument more. In one process each stage is a
    thread. Under ``torchrun`` each stage of each replica is a process.

    >>> trainer = PipelineTrainer(model, args, train_dataset=data, pipeline={"num_stages": 4})

    A batch is what it was: ``per_device_train_batch_size`` x ``gradient_accumulation_steps`` rows
    for each replica. What are steps of accumulation to the Trainer are the pipeline's microbatches:
    ``"2bw"`` needs as many as there are stages. The loss is the one that the Trainer computes: the
    model's own, ``compute_loss_func``, label smoothing, or ``compute_loss`` of a subclass. It is
    over the items of the whole batch where the Trainer counts them. So ``schedule="1f1b"`` trains
    as the Trainer does with accumulation, and ``"2bw"`` with a delay of one step.

    Every rank has the same log history. Checkpoints are folders ``checkpoint-N``, each a source for
    ``from_pretrained``, and runs go on from them on any number of stages. See docs/trainer.md.

    Args:
        model, args: as a Trainer's.
        pipeline: options of :class:`PipelineModule`: ``num_stages``, ``schedule``, ``split``,
            ``devices``, ... Without ``width`` all processes are used.
        pipeline_optimizer: options of :class:`PipelineOptimizer`: ``staleness``, ``shard_state``.
        others: as a Trainer's, by name.

    Attributes:
        pipe: the :class:`PipelineModule`, made when the first training or evaluation begins.

    Raises:
        ValueError: an argument that a pipeline cannot obey, or options that do not go together.
    """

    optimizer: Any
    lr_scheduler: Any
    preprocess_logits_for_metrics: Any
    _created_lr_scheduler: bool

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        pipeline: Mapping[str, Any],
        pipeline_optimizer: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        self._given = pipeline, pipeline_optimizer or {}
        self._recomputes = args.activation_checkpointing
        self._obey(args)
        self.pipe: Any = None
        self._piped: nn.Module | None = None  # the model that it is of
        self._is_optimizer_training = False
        self._microbatches: list[pd2.Microbatch] = []  # of the batch that the loop is in
        self._losses = LossesToCome()
        self._norm: Any = None  # of the gradients of the step before
        self._evaluated: list[Any] = []  # batches, computed, that the loop has yet to get
        self._number_given: list[Any] = []  # of items, while a batch's results are computed
        super().__init__(model, args, **others)
        check_model(self.model)

    def _obey(self, args: TrainingArguments) -> None:
        """Takes the options that the arguments say; a search of hyperparameters changes them."""
        options = obeyed(args, *self._given, recomputes=self._recomputes)
        self._arrangement, self._options, self._optimizer_options = options

    # ------------------------------------------------------------------ the pipeline

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            ReplicaAccelerator.adopt(self.accelerator, self._arrangement)
        elif self.args.n_gpu > 1:  # as the Trainer does for a model on several devices
            self.args._n_gpu = 1  # noqa: SLF001

    def _open(self, loader: Any, *, training: bool) -> Any:
        """Makes the pipeline of the model, if there is none, for calls as the first batch's."""
        if self.pipe is not None:
            if self._piped is self.model:
                return self.pipe
            self.pipe.close()
        options = {**self._options}
        replicated = (*options.pop("replicated", ()), NUMBER)
        with generators_kept():
            batch = self._prepare_inputs(first_batch(loader))
            number = self._get_num_items_in_batch([batch], self.args.device)
            self._calls = Calls(self, batch, number, shifts_labels=self._loss_shifts_labels)
            prepare_for_capture(self.model)
            self.model.train(training)
            self.pipe = pd2.PipelineModule(
                self.model,
                self._calls.loss,
                example_kwargs=self._calls.example,
                replicated=replicated,
                loss_reduction="sum",
                **options,
            )
        self._piped = self.model
        has_results, timeout = self.pipe.gives_output, float(self.args.ddp_timeout)
        self._share = Sharing(self._arrangement, has_results=has_results, timeout=timeout)
        return self.pipe

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return model if self.pipe is None else self.pipe

    # ------------------------------------------------------------------ data

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self.args.dataloader_num_workers > 0:  # they draw the same on all ranks of a replica
            replica, workers = self.accelerator.process_index, self.args.dataloader_num_workers
            draws = functools.partial(seed_worker, num_workers=workers, rank=replica)
            loader.worker_init_fn = draws
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        rows = self._train_batch_size * args.gradient_accumulation_steps
        return int(rows * self._arrangement.width)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        self._microbatches = []
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples, number if number is None else number.clamp(min=1)  # of none the sum is 0

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if self._number_given:
            return self._number_given[0]
        return super()._get_num_items_in_batch(batch_samples, device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return int(super().floating_point_ops(inputs)) // self._arrangement.ranks_per_replica

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_whole(self.args.output_dir) or True
        self._recomputes = self.args.activation_checkpointing  # which the pipeline does
        self.args.activation_checkpointing = False
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.activation_checkpointing = self._recomputes

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        self._obey(self.args)
        pipe = self._open(train_dataloader, training=True)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self._pipe_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = pipe
        self._load_optimizer_and_scheduler(resume)
        self._losses, self._norm = LossesToCome(), None
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return pipe, train_dataloader

    def create_optimizer(self, model: Any = None) -> Any:
        return super().create_optimizer(self.pipe) if self.optimizer is None else self.optimizer

    def _pipe_optimizer(self) -> None:
        if not isinstance(self.optimizer, pd2.PipelineOptimizer):
            step_only(self.pipe.parameters(), self.optimizer)
            self.optimizer = pd2.PipelineOptimizer(self.optimizer, **self._optimizer_options)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return list(super().get_decay_parameter_names(self.model))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs, steps = self._prepare_inputs(inputs), self.current_gradient_accumulation_steps
        self._microbatches.append(self._calls.microbatch(inputs, num_items_in_batch, steps))
        if self.accelerator.sync_gradients:
            model.train()
            if not self._is_optimizer_training:
                self.optimizer.train()
                self._is_optimizer_training = True
            loss = model.train_step(microbatches=self._calls.checked(self._microbatches))
            self._microbatches = []
            self._read_losses()  # of the batches before, which are there
            self._losses.append(self.state.global_step, loss)
        return torch.zeros((), device=self.args.device)  # the loop's sum gets it when it is there

    def _read_losses(self) -> None:
        since, filters = self._globalstep_last_logged, self.args.logging_nan_inf_filter
        self._losses.add_to(self._tr_loss, logged_last=since, filters=filters)

    def _clip_grad_norm(self, model: Any) -> None:
        """Leaves it to the optimizer, which clips."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Keeps the norm of the step before, for a log before that of this one can be read."""
        self._norm = self._newest_norm()

    def _newest_norm(self) -> Any:
        try:
            return self.optimizer.grad_norm
        except ValueError:  # there was no step, or nothing measures it
            return None

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self.control.should_log:
            self._read_losses()
            norm = self._norm if any(self.pipe.session.schedule.delay) else self._newest_norm()
            grad_norm = None if norm is None else float(norm)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _finalize_training(self, *args: Any) -> Any:
        self._read_losses()
        self.pipe.flush()
        return super()._finalize_training(*args)

    # ------------------------------------------------------------------ evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        pipe = self._open(dataloader, training=False)
        self._is_optimizer_training = False  # the loop calls eval()
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        self._preprocess = preprocess  # called where the logits are, before they are sent
        batches = EvaluatedBatches(dataloader, pipe.num_microbatches, self._evaluate_batches)
        try:
            return super().evaluation_loop(batches, *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess
            self._evaluated, self._number_given = [], []

    def _evaluate_batches(self, batches: Sequence[Any]) -> None:
        inputs = [self._prepare_inputs(batch) for batch in batches]
        numbers = [self._get_num_items_in_batch([each], self.args.device) for each in inputs]
        self._evaluated = self._calls.evaluate(self.pipe, inputs, numbers)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        computed, number = self._evaluated.pop(0)
        step = functools.partial(super().prediction_step, computed, inputs, *args, **kwargs)

        def results() -> Any:
            self._number_given = [number]
            loss, logits, labels = step()
            self._number_given = []
            if self._preprocess is not None and logits is not None:
                logits = self._preprocess(logits, labels)
            return loss, logits, labels

        return self._share(results, self.args.device)

    # ------------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        state = None if self.pipe is None else self.pipe.full_state_dict()
        self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        saving = pd2.save(output_dir, self.pipe, self.optimizer, schedulers=[self.lr_scheduler])
        saving.wait()
        if self.args.should_save:
            remove_other_runs(saving.path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leaves the weights to :meth:`_load_optimizer_and_scheduler`, when there is a pipeline."""
        state_in(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            schedulers = [self.lr_scheduler]
            pd2.load(checkpoint, self.pipe, self.optimizer, schedulers=schedulers, generators=False)

    def _load_best_model(self) -> None:
        self.pipe.load_checkpoint(state_in(self.state.best_model_checkpoint))

    def end(self) -> None:
        """Closes the pipeline, then as ``Trainer.end``."""
        if self.pipe is not None:
            self.pipe.close()
        super().end()
