"""With the same tuning, which optimizer? A small network on handwritten digits.

Each optimizer gets the same number of random settings, drawn from a range of three orders of
magnitude around what it usually needs, and the best on validation images is run with new seeds.
`train.fit_many` trains eight copies at a time: eight settings in the search, eight seeds after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ... import cost
from ...lab.claims import equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Study
from ...lab.tuning import LogUniform, Search, Uniform
from ...train import evaluate, fit_many
from .on_digits import TRAIN, splits

BATCH = 50
EPOCH = TRAIN // BATCH  # steps
VALIDATION = "validation accuracy"


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """Train one optimizer with some settings or seeds at once, and measure each copy."""
    settings = runs[0].settings

    def tick(step: int) -> None:
        for run in runs:
            run.tick(step / (EPOCH * settings["epochs"]))

    train, validation, test = (flat(split) for split in splits())
    fitted = fit_many(
        lambda _: network(settings["width"]),
        train,
        seeds=[run.seed for run in runs],
        epochs=settings["epochs"],
        batch=BATCH,
        optimizer=settings["optimizer"],
        lr=each(runs, "lr"),
        weight_decay=each(runs, "weight_decay"),
        options={"momentum": each(runs, "momentum")} if "momentum" in settings else None,
        validation=validation,
        score=share_wrong,
        device=runs[0].device,
        on_step=tick,
    )
    found: list[Metrics] = []
    for run, history, model in zip(runs, fitted.history, fitted.models()):
        draw_curve(run, history.loss, history.validation)
        run.extra |= sizes(model, test)
        best = 1 - min(history.validation.values())
        found.append({"accuracy": evaluate(model, test), VALIDATION: best})
    return found


def flat(data: TensorDataset) -> TensorDataset:
    x, y = data.tensors
    return TensorDataset(x.flatten(1), y)


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def each(runs: Sequence[Running], name: str) -> list[float]:
    return [run.settings[name] for run in runs]


def share_wrong(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(-1) != y).float().mean()


def draw_curve(run: Running, loss: Sequence[float], wrong: dict[int, float]) -> None:
    """Write the mean loss of each epoch, and the validation accuracy after it."""
    run.curve.rewind(-1)
    for step, share in wrong.items():
        mean = fmean(loss[step - EPOCH : step])
        values = {"loss": mean if math.isfinite(mean) else None, VALIDATION: 1 - share}
        run.curve.append(step, **values)


def sizes(model: nn.Module, test: TensorDataset) -> dict[str, Any]:
    """What the page shows of the cost."""
    x = test.tensors[0][:1].to(next(model.parameters()).device)
    flops = cost.forward_flops(lambda: model(x), model)
    return {"flops": flops, "parameters": cost.parameters(model)}


SAME = "one image in a hundred is the least for which we would change a default"

study = Study(
    name="lab/optimizers",
    title="With the same tuning, which optimizer?",
    question="Does an optimizer still matter on handwritten digits when each is tuned alike?",
    run_block=run_block,
    block=8,
    arms={name: {"optimizer": name} for name in ("adam", "adamw", "adagrad", "adadelta", "sgd")},
    metrics={
        "accuracy": Metric("Accuracy", format=".1%"),
        VALIDATION: Metric("Validation accuracy", format=".1%", split="validation"),
    },
    search=Search(
        # Three orders of magnitude each, in the units of the optimizer.
        space={"lr": LogUniform(1e-4, 1e-1), "weight_decay": LogUniform(1e-6, 1e-2)},
        spaces={
            "adagrad": {"lr": LogUniform(1e-3, 1.0)},
            "adadelta": {"lr": LogUniform(1e-2, 10.0)},
            "sgd": {"lr": LogUniform(1e-3, 1.0), "momentum": Uniform(0.5, 0.99)},
        },
        trials={"smoke": 2, "small": 32, "full": 64},
        metric=VALIDATION,
    ),
    scales={
        "smoke": Scale(seeds=2, settings={"epochs": 2, "width": 16}),
        "small": Scale(seeds=32, settings={"epochs": 30, "width": 64}),
        "full": Scale(seeds=64, settings={"epochs": 60, "width": 256}),
    },
    claims=[
        equivalent(
            "adam",
            "adamw",
            margin=0.005,
            metric="accuracy",
            quote="with weight decay tuned, it does not matter whether it is decoupled",
            reason="two of the 450 test images: they differ in the decay alone, so that less than "
            "for different rules should count",
            tier="our own",
        ),
        equivalent(
            "sgd",
            "adam",
            margin=0.01,
            metric="accuracy",
            quote="tuned momentum is as good as Adam",
            reason=SAME,
            tier="our own",
        ),
        equivalent(
            "adagrad",
            "adam",
            margin=0.01,
            metric="accuracy",
            quote="tuned Adagrad is as good as Adam",
            reason=SAME,
            tier="our own",
        ),
        greater(
            "adam",
            "adadelta",
            margin=0.01,
            metric="accuracy",
            quote="Adam beats Adadelta, tuned or not",
            reason=SAME,
            tier="our own",
        ),
    ],
    varies=("first weights", "order of the examples"),
)
