"""One run: one model, one seed, from the first image to `result.json`. All parts come from timm's factories.

A run's folder holds, beside timm's `args.yaml`, `summary.csv`, `last.pth.tar` and `model_best.pth.tar`:

| file | written | holds |
| --- | --- | --- |
| `history.json` | before each checkpoint | one row an epoch, the exact numbers behind `summary.csv` |
| `dynamics.json` | before each checkpoint | the sites' norms and cosines before training and after each epoch |
| `result.json` | once, at the end | the run's figures; a folder without it is an unfinished run |

The order makes every moment safe to die in: `last.pth.tar` is replaced in one step, and whatever was written for an
epoch that it does not hold yet is cut off when the run continues. A continued run ends with the weights of an
uninterrupted one, because every random number follows from seed and epoch.
"""
import json
import math
import time
from argparse import Namespace
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import yaml
from timm.data import resolve_data_config
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model, load_checkpoint, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import (
    AverageMeter,
    CheckpointSaver,
    ModelEmaV3,
    NativeScaler,
    accuracy,
    dispatch_clip_grad,
    random_seed,
    update_summary,
)
from torch import nn

from ..convert import sites
from ..diagnostics import record_dynamics
from . import LabError, write_json, write_text
from .data import DataStream, Source, epoch_seed, loaders

__all__ = ["Run", "build_model", "read_result"]

_MODEL, _DATA = 0, 1  # the two streams of random numbers
Progress = Callable[[int, Optional[dict]], None]  # updates done since the last call, and an epoch's row at its end


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


def read_result(folder: Path) -> Optional[dict]:
    """The figures of a finished run, None of an unfinished one."""
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


class Run:
    """A run, made ready to train; `train` begins it or takes it up where its last checkpoint left it.

    Args:
        options: timm's options, from `recipe.resolve`; `model_kwargs` names the connection.
        source: The data set.
        folder: Where the run's files go.
        device: Where it trains.
    """

    def __init__(self, options: Namespace, source: Source, folder: Path, device: torch.device) -> None:
        self.options, self.folder, self.device = options, folder, device
        self.model = build_model(options, source.num_classes, source.in_chans).to(device)
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.sites = sites(self.model)
        self.train_loader, self.eval_loader, self.mixup = loaders(options, source, self._data_config(source), device)
        self.train_loss = _train_loss(options).to(device)
        self.amp = _autocast(options, device)
        half = options.amp and options.amp_dtype == "float16"
        self.scaler = NativeScaler(device=device.type) if half and device.type == "cuda" else None
        self.optimizer = create_optimizer_v2(
            self.model, **optimizer_kwargs(_with_learning_rate(options)), **options.opt_kwargs)
        self.ema = self._ema() if options.model_ema else None
        self.decreasing = options.eval_metric == "loss"
        self.updates_per_epoch = math.ceil(len(self.train_loader) / self.accumulate)
        self.scheduler, self.epochs = create_scheduler_v2(
            self.optimizer,
            **scheduler_kwargs(options, decreasing_metric=self.decreasing),
            updates_per_epoch=self.updates_per_epoch,
        )
        self.forward = self._compiled()
        self.data_stream = DataStream(device)
        self.history: list[dict] = []
        self.dynamics: list[dict] = []

    @property
    def accumulate(self) -> int:
        return max(1, self.options.grad_accum_steps)

    # ------------------------------------------------------------------------------------------ the run
    def train(self, progress: Progress = lambda updates, row: None) -> dict:
        """Trains to the end and returns what `result.json` holds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "args.yaml", yaml.safe_dump(vars(self.options), default_flow_style=False))
        saver = self._saver()
        start = self._resume(saver)
        progress(start * self.updates_per_epoch, self.history[-1] if self.history else None)
        probe = self._probe_images()
        if start == 0:
            self._record_dynamics(probe)
        for epoch in range(start, self.epochs):
            self._epoch(epoch, saver, probe, progress)
        result = self._result()
        write_json(self.folder / "result.json", result)
        return result

    def _epoch(self, epoch: int, saver: CheckpointSaver, probe: torch.Tensor, progress: Progress) -> None:
        random_seed(epoch_seed(self.options.seed, epoch, _MODEL))
        self.data_stream.reseed(epoch_seed(self.options.seed, epoch, _DATA))
        _reset_peak_memory(self.device)
        began = time.perf_counter()
        train = self._train_epoch(epoch, progress)
        trained = time.perf_counter()
        evaluated = self._evaluate(self.ema.module if self.ema is not None else self.forward)
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
        metric = evaluated[self.options.eval_metric]
        # before the checkpoint, so that it holds the next epoch's learning rate
        self.scheduler.step(epoch + 1, metric)
        self._save(epoch, metric, saver)
        progress(0, row)

    def _train_epoch(self, epoch: int, progress: Progress) -> dict:
        self.forward.train()
        off = self.options.mixup_off_epoch
        mixer = self.mixup if self.mixup is not None else self.train_loader
        if hasattr(mixer, "mixup_enabled"):
            mixer.mixup_enabled = not (off and epoch >= off)
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
                number = epoch * self.updates_per_epoch + index // self.accumulate + 1
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

    def _save(self, epoch: int, metric: float, saver: CheckpointSaver) -> None:
        write_json(self.folder / "history.json", self.history)
        write_json(self.folder / "dynamics.json", self.dynamics)
        saver.save_checkpoint(epoch, metric=metric)
        self._write_summary()

    def _write_summary(self) -> None:
        """`summary.csv` anew from the history, by timm's own writer, so that a continued run repeats no row."""
        partial_file = self.folder / ".summary.csv.partial"
        partial_file.unlink(missing_ok=True)
        for index, row in enumerate(self.history):
            update_summary(
                row["epoch"],
                {"loss": row["train_loss"]},
                {key: row[f"eval_{key}"] for key in ("loss", "top1", "top5")},
                filename=str(partial_file),
                lr=row["lr"],
                write_header=index == 0,
            )
        if self.history:
            partial_file.replace(self.folder / "summary.csv")

    def _saver(self) -> CheckpointSaver:
        saver = CheckpointSaver(
            self.model,
            self.optimizer,
            args=self.options,
            model_ema=self.ema,
            amp_scaler=self.scaler,
            checkpoint_dir=str(self.folder),
            recovery_dir=str(self.folder),
            decreasing=self.decreasing,
            max_history=self.options.checkpoint_hist,
        )
        # With hard links timm removes last.pth.tar before it moves the new one there: killed in between, a run is lost.
        saver.can_hardlink = False
        return saver

    def _resume(self, saver: CheckpointSaver) -> int:
        """Restores everything from the last checkpoint and returns the epoch to begin with, 0 if there is none."""
        last = self.folder / "last.pth.tar"
        if not last.is_file():
            return 0
        try:
            history = json.loads((self.folder / "history.json").read_text(encoding="utf-8"))
            dynamics = json.loads((self.folder / "dynamics.json").read_text(encoding="utf-8"))
            start = resume_checkpoint(self.model, str(last), self.optimizer, self.scaler, log_info=False)
            if self.ema is not None:
                load_checkpoint(self.ema.module, str(last), use_ema=True)
        except Exception as error:  # noqa: BLE001 whatever a damaged file makes torch, pickle or json raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise LabError(f"{last} cannot be continued ({reason}); remove {self.folder} to train it anew") from None
        self.history, self.dynamics = history[:start], dynamics[:start + 1]
        self._replay_schedule(start)
        self._restore_best(saver)
        self._write_summary()
        return start

    def _replay_schedule(self, start: int) -> None:
        """timm's schedulers follow from the epoch, but the plateau's also from each metric: all steps are repeated."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        for row in self.history:
            self.scheduler.step(row["epoch"] + 1, row[f"eval_{self.options.eval_metric}"])
        self.scheduler.step_update(num_updates=start * self.updates_per_epoch, metric=None)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _restore_best(self, saver: CheckpointSaver) -> None:
        """The saver's memory of the best epochs, and the copies of the last one, which a crash may have cut short."""
        sign = 1 if self.decreasing else -1
        worst = math.inf
        ranked = sorted(
            ((row[f"eval_{self.options.eval_metric}"], row["epoch"]) for row in self.history),
            key=lambda item: (worst if item[0] is None else sign * item[0], item[1]),
        )
        last = self.history[-1]["epoch"]
        names = {epoch: self.folder / f"checkpoint-{epoch}.pth.tar" for _, epoch in ranked[:saver.max_history]}
        saver.best_metric, saver.best_epoch = ranked[0]
        if last in names:
            _copy(self.folder / "last.pth.tar", names[last])
        if last == saver.best_epoch:
            _copy(self.folder / "last.pth.tar", self.folder / "model_best.pth.tar")
        kept = [(str(names[epoch]), metric) for metric, epoch in ranked if epoch in names and names[epoch].is_file()]
        saver.checkpoint_files = kept
        for path in self.folder.glob("checkpoint-*.pth.tar"):
            if str(path) not in {name for name, _ in kept}:
                path.unlink()

    def _result(self) -> dict:
        last = self.history[-1]
        key = f"eval_{self.options.eval_metric}"
        best = (min if self.decreasing else max)(self.history, key=lambda row: _number(row[key], self.decreasing))
        speeds = sorted(row["images_per_second"] for row in self.history)
        memory = [row["peak_memory"] for row in self.history if row["peak_memory"]]
        return {
            "model": self.options.model,
            "connection": self.options.model_kwargs["connection"],
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
            "device": _device_name(self.device),
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


def _copy(source: Path, target: Path) -> None:
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.write_bytes(source.read_bytes())
    partial_file.replace(target)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


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
