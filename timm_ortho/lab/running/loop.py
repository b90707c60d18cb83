"""Train one stage of a run in this process, on a CPU or one GPU.

The loop replaces timm's `train.py`, which is not part of timm's wheel. It uses timm's functions for models, optimizers,
schedules, losses and loaders. An option means the same as in `train.py`.

For each epoch, random numbers are seeded from the run's seed and the epoch, separately for the model and the data. Runs
with the same seed therefore see the same batches, even if their connections draw random numbers. A run that was
interrupted and continued ends with the same weights as an uninterrupted run. On a GPU, they may differ by rounding
errors, because cuDNN chooses its algorithms by their measured speed.
"""
import math
import os
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, dispatch_clip_grad, random_seed, update_summary
from torch import nn
from torch.utils.serialization import config as serialization_config

from ..._images import data_config
from ..._text import error_text
from ...diagnostics import record, record_dynamics
from ...model_sites import sites
from ...run_folder import LAST, PROBE, RECORDS, SUMMARY, create_model
from ...weights import WeightsError
from ...weights.files import load_checkpoint, load_weights
from .. import LabError, one_line, whole_file, writing
from ..data import DataStream, Source, epoch_seed, loaders, mixes
from ..folder import Stage, Variant, append_lines

_MODEL, _DATA = 0, 1  # the two streams of random numbers, for `epoch_seed`


def build_model(options: Namespace, num_classes: int, in_chans: int) -> nn.Module:
    """Create the model that timm's options describe. Its weights are initialised with `options.seed`.

    Raises:
        LabError: The file of weights cannot be used.
    """
    random_seed(options.seed)
    try:
        model = create_model(
            {**vars(options), "in_chans": in_chans, "num_classes": num_classes},
            drop_rate=options.drop, drop_path_rate=options.drop_path, drop_block_rate=options.drop_block,
            **options.model_kwargs,
        )
        if options.initial_checkpoint:
            load_weights(model, options.initial_checkpoint)
    except (OSError, WeightsError) as error:
        key = "weights" if options.pretrained_path else "pretrained"
        key = "initial_checkpoint" if options.initial_checkpoint else key
        advice = "; for other classes, use weights in its place" if "size mismatch" in str(error) else ""
        raise LabError(f"option '{key}': {error_text(error)}{advice}") from None
    return model


class Training:
    """The model, optimizer, schedule and loaders of one stage. `train` trains the stage, or its remaining epochs.

    Args:
        plan: The plan of the run.
        stage: The stage to train.
        folder: The folder of the run.
        source: The opened data set.
        options: The options of the stage. `initial_checkpoint`, if set, is a path on this machine.
        model: A model to train. By default, it is built from the options.
    """

    def __init__(self, plan: Variant, stage: Stage, folder: Path, source: Source, options: Namespace,
                 model: Optional[nn.Module] = None) -> None:
        self.plan, self.stage, self.folder, self.options = plan, stage, folder, options
        self.offset = plan.offset(stage)
        self.checkpoint, self.summary = (folder / stage.folder / name for name in (LAST, SUMMARY))
        # files to which each epoch appends rows, relative to the run's folder
        self.growing = [Path(stage.folder, SUMMARY).as_posix(), PROBE, RECORDS]
        self.device = torch.device(options.device)
        if self.device.type == "cuda":  # train.py does the same
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
        self.model = (model or build_model(options, source.num_classes, source.in_chans)).to(self.device)
        if options.channels_last:  # images need no conversion: channels-last weights give channels-last outputs
            self.model.to(memory_format=torch.channels_last)
        self.sites = sites(self.model)
        self.train_loader, self.eval_loader = loaders(
            options, source, data_config(self.model, vars(options), source.in_chans), self.device)
        self.accumulate = max(1, options.grad_accum_steps)
        self.updates_per_epoch = math.ceil(len(self.train_loader) / self.accumulate)
        self.loss = _loss(options).to(self.device)
        self.amp = _autocast(options, self.device)
        half = options.amp and options.amp_dtype == "float16" and self.device.type == "cuda"
        self.scaler = NativeScaler(device=self.device.type) if half else None
        self.optimizer = create_optimizer_v2(
            self.model, **optimizer_kwargs(_with_learning_rate(options)), **options.opt_kwargs)
        self.ema = None
        if options.model_ema:
            self.ema = ModelEmaV3(self.model, decay=options.model_ema_decay, use_warmup=options.model_ema_warmup)
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer, **scheduler_kwargs(options), updates_per_epoch=self.updates_per_epoch)
        self.forward = self.model
        if options.torchcompile:
            self.forward = torch.compile(self.model, backend=options.torchcompile, mode=options.torchcompile_mode)
        self.data = DataStream(self.device)

    # ------------------------------------------------------------------------------------------ the epochs
    def train(self) -> None:
        """Train to the end of the stage. Each epoch writes its metrics and a checkpoint into the run's folder."""
        start, lengths = self._resume()
        if start >= self.stage.last_epoch:  # finished: the code below would drop the rows of the next stage
            return
        for name in self.growing:  # drop the rows that an interrupted epoch wrote after the checkpoint
            path = self.folder / name
            if name not in lengths:
                path.unlink(missing_ok=True)
            elif not path.is_file() or path.stat().st_size < lengths[name]:
                raise LabError(f"{path} has lost rows: remove {self.folder} to train the run again")
            else:
                os.truncate(path, lengths[name])
        recorder = self._recorder(start + self.offset)
        self.data.reseed(epoch_seed(self.options.seed, 0, _DATA))
        self.probe, _ = next(self.data.iterate(self.eval_loader))
        if not start + self.offset:
            self._probe_stream(0)
        try:
            for epoch in range(start, self.stage.last_epoch):
                self._epoch(epoch)
        finally:
            if recorder is not None:
                recorder.close()

    def _recorder(self, first: int) -> Any:
        """Return a recorder that counts steps from epoch `first` on, or None if the plan records nothing."""
        if self.plan.record is None:
            return None
        recorder = record(self.model, every=self.plan.record, sink=partial(append_lines, self.folder / RECORDS))
        recorder.step = first * len(self.train_loader)
        return recorder

    def _epoch(self, epoch: int) -> None:
        random_seed(epoch_seed(self.options.seed, epoch, _MODEL))
        self.data.reseed(epoch_seed(self.options.seed, epoch, _DATA))
        began = time.perf_counter()
        loss, images = self._train_epoch(epoch)
        speed = images / (time.perf_counter() - began)
        evaluated = self._evaluate(self.ema.module if self.ema is not None else self.forward)
        lr = sum(group["lr"] for group in self.optimizer.param_groups) / len(self.optimizer.param_groups)
        trained = {"loss": loss, "images_per_second": speed, "seconds": time.perf_counter() - began,
                   "peak_memory": _peak_memory(self.device)}
        with writing(self.summary):
            update_summary(epoch, trained, evaluated, self.summary, lr=lr, write_header=not self.summary.exists())
        self._probe_stream(epoch + self.offset + 1)
        self.scheduler.step(epoch + 1)  # before saving, so that the checkpoint has the next epoch's learning rate
        self._save(epoch, evaluated["top1"])
        print(f"epoch {epoch + self.offset + 1}/{self.plan.epochs}: top-1 {evaluated['top1']:.2f} %", flush=True)

    def _train_epoch(self, epoch: int) -> tuple[float, int]:
        """Train one epoch, and return the mean loss and the number of training images."""
        self.forward.train()
        self.train_loader.mixup_enabled = not self.options.mixup_off_epoch or epoch < self.options.mixup_off_epoch
        if hasattr(self.train_loader.dataset, "set_epoch"):
            self.train_loader.dataset.set_epoch(epoch)
        losses, images, batches = AverageMeter(), 0, len(self.train_loader)
        self.optimizer.zero_grad()
        for index, (image, target) in enumerate(self.data.iterate(self.train_loader)):
            group_start = index - index % self.accumulate
            group = min(self.accumulate, batches - group_start)
            update = index + 1 == group_start + group
            with self.amp():
                loss = self.loss(self.forward(image), target)
            self._backward(loss / group, update)
            losses.update(loss.detach(), len(image))  # keep a tensor, because reading its value waits for the GPU
            images += len(image)
            if update:
                updates = epoch * self.updates_per_epoch + index // self.accumulate + 1
                if self.ema is not None:
                    self.ema.update(self.model, step=updates)
                self.scheduler.step_update(num_updates=updates)
        return float(losses.avg), images

    def _backward(self, loss: torch.Tensor, update: bool) -> None:
        value, mode = self.options.clip_grad, self.options.clip_mode
        clipped = None if value is None else model_parameters(self.model, exclude_head="agc" in mode)
        if self.scaler is not None:
            self.scaler(loss, self.optimizer, value, mode, parameters=clipped, need_update=update)
        else:
            loss.backward()
            if update and clipped is not None:
                dispatch_clip_grad(clipped, value=value, mode=mode)
            if update:
                self.optimizer.step()
        if update:
            self.optimizer.zero_grad()

    def _evaluate(self, model: nn.Module) -> dict:
        """Return `loss`, `top1` and `top5` over the validation images. The accuracies are in percent."""
        model.eval()
        measured, counts = [], []
        with torch.no_grad():
            for image, target in self.eval_loader:
                with self.amp():
                    output = model(image)
                    loss = nn.functional.cross_entropy(output, target)
                measured.append(torch.stack([loss, *accuracy(output, target, topk=(1, 5))]))
                counts.append(len(image))
        means = np.average(torch.stack(measured).tolist(), axis=0, weights=counts)  # reads the device once
        return dict(zip(("loss", "top1", "top5"), means.tolist(), strict=True))

    def _probe_stream(self, epochs: int) -> None:
        with self.amp():
            measured = record_dynamics(self.model, self.probe, self.sites)
        sites = [{key: value for key, value in site._asdict().items() if value not in ((), None)} for site in measured]
        row = {"epochs_done": epochs, "sites": sites}
        append_lines(self.folder / PROBE, [row])

    # -------------------------------------------------------------------------------------- the checkpoint
    def _parts(self) -> dict[str, Any]:
        """Return the objects whose state a checkpoint stores, by their keys in timm's checkpoints."""
        parts = {"state_dict": self.model, "optimizer": self.optimizer}
        if self.ema is not None:
            parts["state_dict_ema"] = self.ema.module
        if self.scaler is not None:
            parts[self.scaler.state_dict_key] = self.scaler
        return parts

    def _save(self, epoch: int, top1: float) -> None:
        checkpoint = {
            "epoch": epoch, "arch": self.options.model, "version": 2, "args": self.options, "metric": top1,
            "lengths": {path.relative_to(self.folder).as_posix(): path.stat().st_size
                        for path in map(self.folder.joinpath, self.growing) if path.exists()},
            **{name: part.state_dict() for name, part in self._parts().items()}}
        # a module of the user may have switched the checksums off, which `load_checkpoint` needs
        with whole_file(self.checkpoint) as file, serialization_config.patch("save.compute_crc32", True):
            torch.save(checkpoint, file)

    def _resume(self) -> tuple[int, dict[str, int]]:
        """Load the last checkpoint of this stage. If it has none, load the last checkpoint of the first stage.

        If this stage has no checkpoint and begins with only the weights of the first stage, load nothing, because
        `build_model` has loaded the weights. In this case, return epoch 0 and the file sizes of the first stage.

        Returns:
            The epoch to train next, and the sizes that the files in `growing` had at the checkpoint, in bytes.
        """
        before = self.folder / self.plan.stages[0].folder / LAST
        path = self.checkpoint if self.checkpoint.is_file() else before
        if not path.is_file():
            return 0, {}
        try:
            checkpoint = load_checkpoint(path)
            lengths = checkpoint["lengths"]
            if path == before and self.stage.begins_with == "weights":
                return 0, lengths
            for name, part in self._parts().items():
                part.load_state_dict(checkpoint[name])
        except Exception as error:  # noqa: BLE001 damaged files raise many kinds of errors
            raise LabError(f"{path} cannot be read ({one_line(error)}): remove {self.folder} to train the run "
                           "again") from None
        start = checkpoint["epoch"] + 1
        # A schedule by update sets its learning rate from the number of updates. For a schedule by epoch, the call does
        # nothing: the optimizer's state already has the learning rate.
        self.scheduler.step_update(num_updates=start * self.updates_per_epoch)
        return start, lengths


def _loss(options: Namespace) -> nn.Module:
    """Return the training loss that timm's train.py chooses for these options."""
    if mixes(options):
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(options.smoothing) if options.smoothing else nn.CrossEntropyLoss()


def _autocast(options: Namespace, device: torch.device) -> Callable[[], Any]:
    if not options.amp:
        return nullcontext
    return partial(torch.autocast, device_type=device.type, dtype=getattr(torch, options.amp_dtype))


def _with_learning_rate(options: Namespace) -> Namespace:
    """Return the options with the learning rate `lr` set.

    If `lr` is not set, multiply `lr_base` by the ratio of the images per update (batch size times accumulated steps) to
    `lr_base_size`, or by the square root of this ratio. By default (`lr_base_scale` is empty), adaptive optimizers use
    the square root. timm's `train.py` does the same.
    """
    if options.lr:
        return options
    adaptive = any(name in options.opt.lower() for name in ("ada", "lamb"))
    scale = options.lr_base_scale or ("sqrt" if adaptive else "linear")
    ratio = options.batch_size * max(1, options.grad_accum_steps) / options.lr_base_size
    return Namespace(**{**vars(options), "lr": options.lr_base * (ratio ** 0.5 if scale == "sqrt" else ratio)})


def _peak_memory(device: torch.device) -> Optional[int]:
    """Return the largest memory that the process has used, in bytes.

    For a GPU, this is the allocated memory. For a CPU, it is the resident memory, or None on Windows.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
