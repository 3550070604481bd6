"""`fit_many`: train S copies of a model in one batched program, each as if it were alone.

fitted = fit_many(lambda seed: MLP(), train, seeds=range(32), epochs=10, lr=1e-3)
models = fitted.models()            # 32 plain modules
fitted.history[0].loss              # the curve of the first seed

Parameters and buffers are stacked along a first axis S and the model runs under `torch.func.vmap`;
`moiety.MoE` layers then run their `dense` backend. The plain loop with the same results is: build
the model inside `seeded(seed)`, take the batches in the order of `fit`, and call
`torch.manual_seed(step_seed(seed, step))` before each step. Two things draw differently: a GPU, and
dropout inside experts, which here is drawn for all of them, chosen or not.
On a GPU the step runs as a CUDA graph, and convolutions by kernels of our own; on a CPU models
with convolutions are trained one after another, since batching them is slower there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from .block import Block, Loss, ManyFitted, Plan, build
from .fit import _device
from .stacked import OPTIMIZERS

Numbers = float | Sequence[float]  # one for all copies, or one for each
Data = TensorDataset | Sequence[TensorDataset]  # likewise
Schedule = Callable[[int], float]


def fit_many(
    make: Callable[[int], nn.Module],
    train: Data,
    *,
    seeds: Sequence[int],
    epochs: int | None = None,
    steps: int | None = None,
    batch: int = 64,
    lr: Numbers = 1e-3,
    loss: Loss = F.cross_entropy,
    optimizer: str = "adam",
    options: dict[str, Numbers] | None = None,
    weight_decay: Numbers = 0.0,
    schedule: Schedule | Sequence[Schedule] | None = None,
    clip: Numbers | None = None,
    validation: Data | None = None,
    score: Loss | None = None,
    every: int | None = None,
    patience: int | None = None,
    min_gain: float = 0.0,
    block: int | None = None,
    graph: bool = True,
    device: torch.device | str | None = None,
    on_step: Callable[[int], None] | None = None,
) -> ManyFitted:
    """Train one copy of the model per seed, all at once; the losses of routers are included.

    make          builds the model of a seed; it is called inside `seeded(seed)`
    train         inputs and targets, for all copies or a list with those of each (of equal sizes)
    seeds         each decides initialisation, order of the examples, dropout and routing noise;
                  a seed may occur again with other settings
    lr, weight_decay, clip, schedule and each of `options`: one for all, or a list with one for each
    loss          (output, target) -> scalar, of one copy
    optimizer     "adam", "adamw", "adagrad", "adadelta" or "sgd", as in torch.optim
    options       of the optimizer: beta1, beta2, eps; eps; rho, eps; momentum, nesterov (0 or 1)
    schedule      step, from 0 -> factor of the learning rate
    clip          the largest norm of a copy's own gradient
    validation    measured every `every` steps (an epoch) with `score` (the loss), a mean over
                  examples that is better when lower; each copy keeps its best weights
    patience      a copy stops after so many measurements that are not better by `min_gain`
    block         train so many copies at a time; the results are the same
    graph         on a GPU, capture the step where that is possible; False is easier to debug
    on_step       called after each step of a block with its number, from 1
    """
    seeds, count = list(seeds), len(seeds)
    trains, validations = _data("train", train, count), _data("validation", validation, count)
    per_epoch = math.ceil(len(trains[0]) / batch) if trains else 0
    plan = Plan(
        steps=_steps(epochs, steps, per_epoch),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        score=score or loss,
        every=every or per_epoch,
        patience=math.inf if patience is None else patience,
        min_gain=min_gain,
        graph=graph,
    )
    if validation is None and (patience is not None or score is not None or every is not None):
        raise ValueError("patience, score and every are about validation data: give validation")
    if not seeds:
        raise ValueError("seeds is empty: give at least one seed")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    numbers = _numbers(optimizer, options or {}, count, weight_decay, clip)
    rates = _column_of("lr", lr, count) * _factors(schedule, plan.steps, count)
    blocks = []
    block = block or _block_of(build(make, seeds[0], device), count)
    for ids in torch.arange(count).split(block):
        own = {name: t[ids] for name, t in numbers.items()}
        data = {
            "train": trains if len(trains) < 2 else [trains[i] for i in ids],
            "validation": validations if len(validations) < 2 else [validations[i] for i in ids],
        }
        one = Block(plan, make, [seeds[i] for i in ids], own, rates[:, ids], device, **data)
        blocks.append(one.run(on_step))
    return ManyFitted(
        seeds,
        [h for b in blocks for h in b.history],
        [s for b in blocks for s in b.best_step],
        {n: torch.cat([b.state[n] for b in blocks]) for n in blocks[0].state},
        blocks[0].base,
    )


def _block_of(model: nn.Module, count: int) -> int:
    """How many copies to train at once where the caller does not say."""
    convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in model.modules())
    if count == 1 or not convolves or _device(model).type != "cpu":
        return count
    warnings.warn(
        f"fit_many trains the {count} copies of {type(model).__name__} one after another: on a "
        "CPU batched convolutions are slower (block=… decides otherwise)",
        stacklevel=3,
    )
    return 1


# -- what the caller gave -------------------------------------------------------------------------


def _data(word: str, given: Data | None, count: int) -> list[TensorDataset]:
    """One data set for all copies, or one for each; none where none was given."""
    each = [] if given is None else [given] if isinstance(given, TensorDataset) else list(given)
    if given is not None and len(each) not in (1, count):
        raise ValueError(f"{word} has {len(each)} data sets for {count} seeds: give one for each")
    kinds = {", ".join(f"{list(t.shape)} {t.dtype}" for t in own.tensors) for own in each}
    if len(kinds) > 1:
        found = " and ".join(sorted(kinds))
        raise ValueError(f"the data sets of {word} must be of one size and type, got {found}")
    if each and len(each[0]) == 0:
        raise ValueError(f"{word} is empty: give examples")
    return each


def _steps(epochs: int | None, steps: int | None, per_epoch: int) -> int:
    if (epochs is None) == (steps is None):
        raise ValueError("give either steps or epochs")
    wanted = steps if steps is not None else (epochs or 0) * per_epoch
    if wanted < 1:
        raise ValueError("there is nothing to train: steps, epochs and the data must not be empty")
    return wanted


def _column_of(name: str, value: Numbers, count: int) -> Tensor:
    # float64: 1 - 0.999 in float32 is wrong in the fifth digit, where torch.optim is not.
    number_S = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    if number_S.dim() == 0:
        return number_S.expand(count)
    if len(number_S) != count:
        raise ValueError(f"{name} has {len(number_S)} values for {count} seeds: give one for each")
    return number_S


def _numbers(
    optimizer: str, options: dict[str, Numbers], count: int, weight_decay: Numbers, clip: Any
) -> dict[str, Tensor]:
    defaults = OPTIMIZERS[optimizer][0]
    unknown = [name for name in options if name not in defaults]
    if unknown:
        raise ValueError(
            f"{optimizer} has no option {unknown[0]!r}; its options are {', '.join(defaults)}"
        )
    given: dict[str, Numbers] = {**defaults, **options, "weight_decay": weight_decay}
    if clip is not None:
        given["clip"] = clip
    numbers = {name: _column_of(name, value, count) for name, value in given.items()}
    if not numbers["weight_decay"].any():
        del numbers["weight_decay"]  # a pass over all parameters less
    return numbers


def _factors(schedule: Schedule | Sequence[Schedule] | None, steps: int, count: int) -> Tensor:
    """`[steps, S or 1]`: what the learning rates are multiplied with."""
    if schedule is None:
        return torch.ones(steps, 1, dtype=torch.float64)
    each = list(schedule) if isinstance(schedule, Sequence) else [schedule]
    if isinstance(schedule, Sequence) and len(each) != count:
        raise ValueError(f"schedule has {len(each)} values for {count} seeds: give one for each")
    rows = [[factor(step) for factor in each] for step in range(steps)]
    return torch.tensor(rows, dtype=torch.float64)
