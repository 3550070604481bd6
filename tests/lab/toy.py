"""A small real study for the tests of the lab: a network learns a line, with checkpoints."""

import os
import time

import torch
from torch import nn

from moiety.lab.claims import greater
from moiety.lab.study import Metric, Scale, Speed, Study

EVERY = 5  # steps between checkpoints


def data(seed):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).tanh()


def note(line):
    """Write down that a step is begun, for the tests that count them."""
    if path := os.environ.get("TOY_LOG"):
        with open(path, "a") as file:  # two processes may: a short line is written at once
            file.write(line)


def train(running):
    """Train, and continue a training that was cut short, to the same bits."""
    settings, steps = running.settings, running.settings.get("examples", 0) // 16
    steps = steps or running.settings["steps"]
    model = nn.Sequential(
        nn.Linear(4, settings["width"]), nn.Tanh(), nn.Linear(settings["width"], 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    order = torch.Generator().manual_seed(running.seed)
    (x, y), begin = data(0), 0
    if state := running.checkpoint.load():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.set_state(state["order"])
        begin = state["step"]
    running.curve.rewind(begin)
    for step in range(begin + 1, steps + 1):
        note(f"{running.trial.key} {step} {os.getpid()}\n")
        chosen = torch.randint(64, (16,), generator=order)
        loss = (model(x[chosen]) - y[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(settings.get("sleep", 0))
        running.curve.append(step, loss=loss.item())
        if step % EVERY == 0 and settings.get("checkpoints", True):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            running.checkpoint.save({**state, "order": order.get_state(), "step": step})
        running.tick(step / steps)
    running.extra["parameters"] = sum(p.numel() for p in model.parameters())
    x, y = data(1)
    with torch.no_grad():
        return {"error": (model(x) - y).square().mean().item()}


study = Study(
    name="tests/toy",
    title="Width of a small network",
    question="Is a wide network better than a narrow one?",
    run=train,
    arms={"narrow": {"width": 2}, "wide": {"width": 16}},
    metrics={"error": Metric("Error", better="lower")},
    scales={
        "smoke": Scale(seeds=3, settings={"steps": 8}),
        "small": Scale(seeds=3, settings={"steps": 30, "sleep": 0.004}),
        "full": Scale(seeds=3, settings={"steps": 100, "sleep": 0.02}),
    },
    claims=[
        greater(
            "wide",
            "narrow",
            margin=0.2,
            metric="error",
            quote="wider is better",
            reason="a third of the error of a guess",
            tier="our own",
        )
    ],
    varies=("first weights", "order of the examples"),
    speed=lambda settings, device: Speed(seconds=2e-3, flops=10.0 * settings["width"], start=0.01),
)
