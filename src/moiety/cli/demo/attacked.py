"""The last step of the demo: an audit of the model whose life it showed, on a few test images."""

from __future__ import annotations

from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from ...report import AuditPart
from ...report.audit import answers

EPS = (0.0, 0.05, 0.1, 0.2)  # of pixels in 0…1
ATTACKS = ("apgd", "apgd + router-margin")
EXAMPLES, STEPS = 64, 10
TITLE = "The same model under attack"
SUMMARY = (
    f"AutoPGD moves every pixel of {EXAMPLES} turned test images by at most ε, towards wrong "
    f"answers, in {STEPS} steps: orientation, no more. The command moiety audit does it to a model "
    "of yours."
)


def run(
    model: nn.Module, test: TensorDataset, seed: int, console: Console | None = None
) -> AuditPart:
    """Attack a model on the first test images; its part of the page."""
    from ...robust import audit

    device = next(model.parameters()).device
    x, y = (t[:EXAMPLES].to(device) for t in test.tensors)
    with (console or Console()).status(TITLE):
        found = audit(
            model.eval(),
            (x, y),
            EPS,
            ATTACKS,
            steps=STEPS,
            masking=32,
            lipschitz=0,
            seed=seed,
            progress=False,  # the line of `status` is enough
        )
    return AuditPart(title=TITLE, summary=SUMMARY, result=found.result)


def sentence(part: AuditPart) -> str:
    """What came out, for the terminal."""
    return answers(part.result)["Under attack"]
