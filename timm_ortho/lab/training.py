"""One run: one model, one seed, from the first image to `result.json`. All parts come from timm's factories.

What a run writes, and how it continues, is in `checkpoints`. A continued run ends with the weights of an uninterrupted
one, because every random number follows from seed and epoch.
"""
import math
import time
from argparse import Namespace
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import yaml
from timm.data import resolve_data_config
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model, model_parameters
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, dispatch_clip_grad, random_seed
from torch import nn

from ..connections import sites
from ..convert import connect
from ..diagnostics import record, record_dynamics
from ..models._build import pop_connection_arguments
from ..runs.provenance import device_name, made_with
from . import LabError, write_json, write_text
from .checkpoints import Checkpoints, disk_errors, read_json
from .data import DataStream, Source, epoch_seed, loaders
from .features import measure_features

__all__ = ["Extras", "Run", "build_model"]

_MODEL, _DATA = 0, 1  # the two streams of random numbers
Progress = Callable[[int, Optional[dict]], None]  # updates done since the last call, and an epoch's row at its end


@dataclass(frozen=True)
class Extras:
    """What a run does beside what timm's options can say.

    Attributes:
        switch_to: The connection that takes over in mid-training; None for no switch.
        reinitialise: With the new connection optimizer, schedule and EMA begin anew, for as many epochs as before
            (paper, Table 3). Otherwise all go on, and the switch comes at half of the epochs (Table 10).
        record_every: `timm_ortho.record` looks at the connections every so many training steps; None for never.
        representation: At the end the features of the validation images are measured and stored.
    """

    switch_to: Optional[str] = None
    reinitialise: bool = False
    record_every: Optional[int] = None
    representation: bool = False


def build_model(options: Namespace, num_classes: int, in_chans: int) -> nn.Module:
    """timm's model for the options, freshly initialised from the seed."""
    random_seed(options.seed)
    model = create_model(
        options.model,
        pretrained=options.pretrained,
        in_chans=in_chans,
        num_classes=num_classes,
        drop_rate=options.drop,
        drop_path_rate=options.drop_path,
        drop_block_rate=options.drop_block,
        global_pool=options.gp,
        bn_momentum=options.bn_momentum,
        bn_eps=options.bn_eps,
        checkpoint_path=options.initial_checkpoint,
        **options.model_kwargs,
    )
    head = model.get_classifier()
    with torch.no_grad():
        if options.head_init_scale is not None:
            head.weight.mul_(options.head_init_scale)
            head.bias.mul_(options.head_init_scale)
        if options.head_init_bias is not None:
            head.bias.fill_(options.head_init_bias)
    if options.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


class Run:
    """A run, made ready to train; `train` begins it or takes it up where its last checkpoint left it.

    Args:
        options: timm's options, from `recipe.resolve`; `model_kwargs` names the connection.
        source: The data set.
        folder: Where the run's files go.
        device: Where it trains.
        extras: What timm's options cannot say.
    """

    def __init__(
            self,
            options: Namespace,
            source: Source,
            folder: Path,
            device: torch.device,
            extras: Extras = Extras(),
    ) -> None:
        self.options, self.folder, self.device, self.extras = options, folder, device, extras
        self.made_with, self.labels = made_with(), source.labels
        self.model = build_model(options, source.num_classes, source.in_chans).to(device)
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.sites = sites(self.model)
        self.train_loader, self.eval_loader, self.mixup = loaders(options, source, self._data_config(source), device)
        self.updates_per_epoch = math.ceil(len(self.train_loader) / self.accumulate)
        self.train_loss = _train_loss(options).to(device)
        self.amp = _autocast(options, device)
        half = options.amp and options.amp_dtype == "float16"
        self.scaler = NativeScaler(device=device.type) if half and device.type == "cuda" else None
        self._start_optimizer(0)
        self.epochs, self.switch_epoch = self._plan_epochs()
        self.forward = self._compiled()
        self.data_stream = DataStream(device)
        self.checkpoints = Checkpoints(
            folder, options, model=self.model, optimizer=self.optimizer, model_ema=self.ema, amp_scaler=self.scaler)
        self.history: list[dict] = []
        self.dynamics: list[dict] = []
        self.marks: list[dict] = []
        self.recorder: Any = None

    @property
    def accumulate(self) -> int:
        return max(1, self.options.grad_accum_steps)

    # ------------------------------------------------------------------------------------------ the run
    def train(self, progress: Progress = lambda updates, row: None) -> dict:
        """Trains to the end and returns what `result.json` holds."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / "args.yaml", yaml.safe_dump(vars(self.options), default_flow_style=False))
        if self.extras.record_every is not None:
            self.recorder = record(self.model, every=self.extras.record_every)
        try:
            return self._train(progress)
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def _train(self, progress: Progress) -> dict:
        start = self._resume()
        progress(start * self.updates_per_epoch, self.history[-1] if self.history else None)
        probe = self._probe_images()
        if start == 0:
            self._record_dynamics(probe)
        for epoch in range(start, self.epochs):
            if epoch == self.switch_epoch:
                self._switch()
            self._epoch(epoch, probe, progress)
        result = self._result()
        if self.extras.representation:
            result["representation"] = self._represent()
        with disk_errors(self.folder):
            write_json(self.folder / "result.json", result)
        return result

    def _epoch(self, epoch: int, probe: torch.Tensor, progress: Progress) -> None:
        random_seed(epoch_seed(self.options.seed, epoch, _MODEL))
        self.data_stream.reseed(epoch_seed(self.options.seed, epoch, _DATA))
        _reset_peak_memory(self.device)
        began = time.perf_counter()
        train = self._train_epoch(epoch, progress)
        trained = time.perf_counter()
        evaluated = self._evaluate(self._evaluated_model())
        lr = sum(group["lr"] for group in self.optimizer.param_groups) / len(self.optimizer.param_groups)
        row = {
            "epoch": epoch,
            "train_loss": train["loss"],
            **{f"eval_{key}": value for key, value in evaluated.items()},
            "lr": lr,
            "images_per_second": train["images"] / (trained - began),
            "seconds": time.perf_counter() - began,
            "peak_memory": _peak_memory(self.device),
        }
        self.history.append(row)
        self._record_dynamics(probe)
        # before the checkpoint, so that it holds the next epoch's learning rate
        self.scheduler.step(epoch + 1 - self.optimizer_epoch, evaluated[self.options.eval_metric])
        self._save()
        progress(0, row)

    def _train_epoch(self, epoch: int, progress: Progress) -> dict:
        self.forward.train()
        off, done = self.options.mixup_off_epoch, epoch - self.optimizer_epoch
        mixer = self.mixup if self.mixup is not None else self.train_loader
        if hasattr(mixer, "mixup_enabled"):
            mixer.mixup_enabled = not (off and done >= off)
        if hasattr(self.train_loader.dataset, "set_epoch"):
            self.train_loader.dataset.set_epoch(epoch)
        losses, images, batches = AverageMeter(), 0, len(self.train_loader)
        self.optimizer.zero_grad()
        for index, (image, target) in enumerate(self.data_stream.iterate(self.train_loader)):
            image, target = self._to_device(image, target, self.mixup)
            group_start = index - index % self.accumulate
            group = min(self.accumulate, batches - group_start)
            with self.amp():
                loss = self.train_loss(self.forward(image), target)
            update = index + 1 == group_start + group
            self._backward(loss / group, update)
            losses.update(loss.detach(), len(image))  # a tensor: reading it here would stop a GPU at every step
            images += len(image)
            if update:
                number = done * self.updates_per_epoch + index // self.accumulate + 1
                if self.ema is not None:
                    self.ema.update(self.model, step=number)
                self.scheduler.step_update(num_updates=number, metric=None)
                progress(1, None)
        if hasattr(self.optimizer, "sync_lookahead"):
            self.optimizer.sync_lookahead()
        return {"loss": float(losses.avg), "images": images}

    def _backward(self, loss: torch.Tensor, update: bool) -> None:
        options = self.options
        clipped = None
        if options.clip_grad is not None:
            clipped = model_parameters(self.model, exclude_head="agc" in options.clip_mode)
        if self.scaler is not None:
            self.scaler(
                loss, self.optimizer, clip_grad=options.clip_grad, clip_mode=options.clip_mode, parameters=clipped,
                need_update=update)
        else:
            loss.backward()
            if update and clipped is not None:
                dispatch_clip_grad(clipped, value=options.clip_grad, mode=options.clip_mode)
            if update:
                self.optimizer.step()
        if update:
            self.optimizer.zero_grad()

    def _evaluated_model(self) -> nn.Module:
        return self.ema.module if self.ema is not None else self.forward

    def _evaluate(self, model: nn.Module) -> dict:
        """Loss and accuracies over the validation set, by timm's names."""
        model.eval()
        meters = {key: AverageMeter() for key in ("loss", "top1", "top5")}
        with torch.no_grad():
            for image, target in self.eval_loader:
                image, target = self._to_device(image, target)
                with self.amp():
                    output = model(image)
                    loss = nn.functional.cross_entropy(output, target)
                top1, top5 = accuracy(output, target, topk=(1, 5))
                for meter, value in zip(meters.values(), (loss, top1, top5), strict=True):
                    meter.update(value.item(), len(image))
        return {key: meter.avg for key, meter in meters.items()}

    # ------------------------------------------------------------------------- optimizer, schedule, connection
    def _start_optimizer(self, epoch: int) -> None:
        """Optimizer, schedule and EMA as they are before the epoch `epoch`, the first that they see."""
        self.optimizer_epoch = epoch
        self.optimizer = create_optimizer_v2(
            self.model, **optimizer_kwargs(_with_learning_rate(self.options)), **self.options.opt_kwargs)
        self.ema = self._ema() if self.options.model_ema else None
        self.scheduler, self.scheduled_epochs = create_scheduler_v2(
            self.optimizer,
            **scheduler_kwargs(self.options, decreasing_metric=self.options.eval_metric == "loss"),
            updates_per_epoch=self.updates_per_epoch,
        )

    def _plan_epochs(self) -> tuple[int, Optional[int]]:
        """The number of epochs, and before which the connection is switched."""
        if self.extras.switch_to is None:
            return self.scheduled_epochs, None
        if self.extras.reinitialise:
            return 2 * self.scheduled_epochs, self.scheduled_epochs
        if self.scheduled_epochs < 2:
            raise LabError("a connection cannot be switched in the middle of one epoch: give two epochs or more")
        return self.scheduled_epochs, self.scheduled_epochs // 2

    def _switch(self) -> None:
        """The second connection, with the optimizer that the extras ask for."""
        arguments = pop_connection_arguments(dict(self.options.model_kwargs), self.extras.switch_to)
        arguments["connection"] = self.extras.switch_to
        connect(self.model, **arguments)
        if self.ema is not None:
            connect(self.ema.module, **arguments)
        self.sites, self.forward = sites(self.model), self._compiled()
        if self.extras.reinitialise:
            self._start_optimizer(self.switch_epoch)
            self.checkpoints.optimizer, self.checkpoints.model_ema = self.optimizer, self.ema

    def _replay_schedule(self) -> None:
        """timm's schedulers follow from the epoch, but the plateau's also from each metric: all steps are repeated."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        rows = self.history[self.optimizer_epoch:]
        for done, row in enumerate(rows, 1):
            self.scheduler.step(done, row[f"eval_{self.options.eval_metric}"])
        self.scheduler.step_update(num_updates=len(rows) * self.updates_per_epoch, metric=None)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # ------------------------------------------------------------------------------- records and checkpoints
    def _probe_images(self) -> torch.Tensor:
        """The first validation batch: what the dynamics are measured on, the same for all runs."""
        self.data_stream.reseed(epoch_seed(self.options.seed, 0, _DATA))
        image, target = next(self.data_stream.iterate(self.eval_loader))
        return self._to_device(image, target)[0]

    def _record_dynamics(self, probe: torch.Tensor) -> None:
        with self.amp():
            records = record_dynamics(self.model, probe, self.sites)
        self.dynamics.append({"epochs_done": len(self.history), "sites": [record._asdict() for record in records]})

    def _represent(self) -> dict:
        self.data_stream.reseed(epoch_seed(self.options.seed, 0, _DATA))
        batches = (self._to_device(*batch)[0] for batch in self.data_stream.iterate(self.eval_loader))
        with self.amp():
            return measure_features(self._evaluated_model(), batches, self.folder)

    def _save(self) -> None:
        records = {"dynamics": self.dynamics}
        if self.recorder is not None:
            self.marks.append({"step": self.recorder.step, "rows": len(self.recorder.rows)})
            records["records"] = {"marks": self.marks, "rows": self.recorder.rows}
        self.checkpoints.save(self.history, records)

    def _resume(self) -> int:
        """Restores everything from the last checkpoint and returns the epoch to begin with, 0 if there is none."""
        checkpoint = self.checkpoints.load()
        if checkpoint is None:
            return 0
        start = checkpoint["epoch"] + 1
        self.history = read_json(self.folder / "history.json")[:start]
        self.dynamics = read_json(self.folder / "dynamics.json")[:start + 1]
        if self.recorder is not None:
            self._resume_recorder(start)
        if self.switch_epoch is not None and start > self.switch_epoch:
            self._switch()
        try:
            self.model.load_state_dict(checkpoint["state_dict"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            if self.ema is not None:
                self.ema.module.load_state_dict(checkpoint["state_dict_ema"])
            if self.scaler is not None:
                self.scaler.load_state_dict(checkpoint[self.scaler.state_dict_key])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise LabError(f"{self.checkpoints.last} is of another model ({reason}); "
                           f"remove {self.folder} to train it anew") from None
        self._replay_schedule()
        self.checkpoints.take_up(self.history)
        return start

    def _resume_recorder(self, start: int) -> None:
        records = read_json(self.folder / "records.json")
        self.marks = records["marks"][:start]
        mark = self.marks[-1]
        self.recorder.load_state_dict({"step": mark["step"], "rows": records["rows"][:mark["rows"]]})

    def _result(self) -> dict:
        last = self.history[-1]
        key = f"eval_{self.options.eval_metric}"
        decreasing = self.checkpoints.decreasing
        best = (min if decreasing else max)(self.history, key=lambda row: _number(row[key], decreasing))
        speeds = sorted(row["images_per_second"] for row in self.history)
        memory = [row["peak_memory"] for row in self.history if row["peak_memory"]]
        return {
            "model": self.options.model,
            "connection": self.extras.switch_to or self.options.model_kwargs["connection"],
            "seed": self.options.seed,
            "epochs": self.epochs,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "top1": last["eval_top1"],
            "top5": last["eval_top5"],
            "loss": last["eval_loss"],
            "best_top1": best["eval_top1"],
            "best_epoch": best["epoch"],
            "images_per_second": speeds[len(speeds) // 2],  # the median epoch
            "peak_memory": max(memory, default=None),
            "seconds": sum(row["seconds"] for row in self.history),
            "device": device_name(self.device),
            "extras": asdict(self.extras),
            "switch_epoch": self.switch_epoch,
            "labels": self.labels,
            "made_with": self.made_with,
        }

    # --------------------------------------------------------------------------------------------- parts
    def _data_config(self, source: Source) -> dict:
        config = resolve_data_config({**vars(self.options), "in_chans": source.in_chans}, model=self.model)
        channels = config["input_size"][0]
        for key in ("mean", "std"):
            if len(config[key]) != channels:  # what timm does as well, there with a warning
                config[key] = (sum(config[key]) / len(config[key]),) * channels
        return config

    def _to_device(self, image: torch.Tensor, target: torch.Tensor, mixup: Optional[Callable] = None):
        image, target = image.to(self.device), target.to(self.device)
        if mixup is not None:
            with self.data_stream.lent():
                image, target = mixup(image, target)
        if self.options.channels_last:
            image = image.contiguous(memory_format=torch.channels_last)
        return image, target

    def _ema(self) -> ModelEmaV3:
        return ModelEmaV3(
            self.model, decay=self.options.model_ema_decay, use_warmup=self.options.model_ema_warmup,
            device=self.device)

    def _compiled(self) -> nn.Module:
        if not self.options.torchcompile:
            return self.model
        return torch.compile(self.model, backend=self.options.torchcompile, mode=self.options.torchcompile_mode)


def _train_loss(options: Namespace) -> nn.Module:
    """The loss that timm's train.py would choose."""
    mixing = options.mixup > 0 or options.cutmix > 0 or options.cutmix_minmax is not None
    if options.bce_loss and (mixing or options.smoothing):
        weight = options.bce_pos_weight
        return BinaryCrossEntropy(
            smoothing=0.0 if mixing else options.smoothing,  # mixup smooths its targets itself
            target_threshold=options.bce_target_thresh,
            sum_classes=options.bce_sum,
            pos_weight=weight,
        )
    if mixing:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(options.smoothing) if options.smoothing else nn.CrossEntropyLoss()


def _autocast(options: Namespace, device: torch.device) -> Callable[[], Any]:
    if not options.amp:
        return nullcontext
    if options.amp_dtype not in ("float16", "bfloat16"):
        raise LabError(f"amp_dtype is '{options.amp_dtype}', but must be float16 or bfloat16")
    return partial(torch.autocast, device_type=device.type, dtype=getattr(torch, options.amp_dtype))


def _with_learning_rate(options: Namespace) -> Namespace:
    """timm's rule where only `lr_base` is given: scaled by the batch, by its root for the adaptive optimizers."""
    if options.lr:
        return options
    adaptive = any(name in options.opt.lower() for name in ("ada", "lamb"))
    scale = options.lr_base_scale or ("sqrt" if adaptive else "linear")
    ratio = options.batch_size * max(1, options.grad_accum_steps) / options.lr_base_size
    options = Namespace(**vars(options))
    options.lr = options.lr_base * (ratio ** 0.5 if scale == "sqrt" else ratio)
    return options


def _number(value: Optional[float], decreasing: bool) -> float:
    """A diverged run's NaN, or the null that JSON made of it, counts as the worst there is."""
    if value is None or math.isnan(value):
        return math.inf if decreasing else -math.inf
    return value


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # then there is no /proc, and _peak_memory says so
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark back to what is used now


def _peak_memory(device: torch.device) -> Optional[int]:
    """Bytes: allocated on a GPU, resident in the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return None  # not Linux: there is no mark that could be told apart from other runs' in the same process
