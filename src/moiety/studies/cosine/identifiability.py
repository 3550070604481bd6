"""What can be learned of a mixture at all: flat directions, and how tau curves them.

An arm is a gate with k tanh experts under a convention; a draw is a true mixture of the law of
`regression.py`, the same for all arms of one k. Flat directions are those of the Gauss–Newton
matrix, counted and compared with what digest 5 §3 found in a table of ours; the radial derivative
<b1, ds/db1> of a score is what the paper's differential equation says is zero.
"""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import Tensor

from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from . import PAPER
from .regression import Atoms, Gate, inputs, law, scores
from .spectrum import gauss_newton

DIM, POINTS = 3, 2000  # digest 5 §3
FLAT = 1e-18  # of the largest eigenvalue; rounding leaves 1e-30, the smallest others 1e-12
FRESH = 10_000  # the first seed of draws: others were looked at while this was written
TAU = 0.5
TAUS = (0.001, 0.01, 0.1, 0.5, 1.0, 3.0)


def run(running: Running) -> Metrics:
    """Take one gate apart on as many true mixtures as the scale says."""
    settings, facts = running.settings, []
    draws = settings["draws"]
    generator = torch.Generator().manual_seed(FRESH + running.seed)
    running.curve.rewind(-1)
    for number in range(1, draws + 1):
        facts.append(look(settings, generator))
        running.curve.append(number, loss=fmean(abs(fact["beyond"]) for fact in facts))
        running.tick(number / draws)
    return {
        name: fmean(fact[name] for fact in facts) if name in facts[0] else None for name in METRICS
    }


def look(settings: Settings, generator: torch.Generator) -> dict[str, float]:
    """Draw a true mixture, and measure it under the gate of an arm."""
    gate = Gate(settings["gate"], settings["tau_1"], settings["tau_2"])
    # Drawn for the linear gate whatever the arm is, so that arms are compared on the same mixtures.
    drawn, _ = law(1, settings["k"], DIM, Gate("linear"), "tanh", generator)
    b1 = drawn.b1.clone()
    b1[:, -1] = gate.reference(b1[:, -1])
    atoms, x = Atoms(b1, drawn.b0, drawn.eta), inputs(POINTS, DIM, generator)
    values = gauss_newton(atoms, x, gate, "tanh", settings["convention"])[0]
    flat = int((values < FLAT * values[-1]).sum())
    found = {"beyond": flat - settings["expected"], "flat": flat, **radial(atoms, x, gate)}
    if not settings["expected"]:  # else the smallest is rounding
        found["smallest"] = values[0].log10().item()
        if gate.tau_1:
            found["over tau"] = found["smallest"] - 2 * math.log10(gate.tau_1)
    return found


def radial(atoms: Atoms, x: Tensor, gate: Gate) -> dict[str, float]:
    """<b1, ds/db1> beside the score s without its bias, and beside s tau_1 / (‖b1‖ + tau_1)."""
    b1, zero = atoms.b1[:, :-1], atoms.b0[:, :-1] * 0  # the reference has no direction

    def score(b1: Tensor) -> Tensor:
        return scores(Atoms(b1, zero, atoms.eta[:, :-1]), x, gate)

    s, found = torch.func.jvp(score, (b1,), (b1,))[:2]
    norm = b1.norm(dim=-1)[..., None]
    said = s if gate.kind == "linear" else s * gate.tau_1 / (norm + gate.tau_1)
    return {
        "radial": (found.square().mean() / s.square().mean()).sqrt().item(),
        "identity": (found - said).abs().max().item(),
    }


METRICS = {
    "beyond": Metric("Flat directions beyond the digest's", better="", format=".2f", split=""),
    "flat": Metric("Flat directions", better="lower", format=".2f", split=""),
    "smallest": Metric("log10 of the smallest eigenvalue", format=".2f", split=""),
    "over tau": Metric("log10 of it over tau squared", better="", format=".2f", split=""),
    "radial": Metric("Radial derivative over the score", format=".2g", split=""),
    "identity": Metric("Error of its formula", better="lower", format=".1g", split=""),
}

# -- arms ------------------------------------------------------------------------------------------

# Flat directions in digest 5 §3, d = 3, for k = 2, 3, 4 experts. "direction" was not counted there:
# without the lengths, vanilla's only flat ones, none should be left.
DIGEST = {
    ("vanilla", "free"): (3, 3, 4),
    ("perturbed", "free"): (3, 3, 3),
    ("vanilla", "reference"): (1, 2, 3),
    ("perturbed", "reference"): (0, 0, 0),
    ("vanilla", "direction"): (0, 0, 0),
}


def arm(
    gate: str,
    tau_1: float = 0.0,
    tau_2: float = 0.0,
    *,
    k: int = 3,
    convention: str = "reference",
    expected: int = 0,
) -> Settings:
    words = {"gate": gate, "tau_1": tau_1, "tau_2": tau_2}
    return {**words, "k": k, "convention": convention, "expected": expected}


def of_table(gate: str, convention: str, k: int) -> Settings:
    tau = TAU if gate == "perturbed" else 0.0
    expected = DIGEST[gate, convention][k - 2]
    return arm(gate, tau, tau, k=k, convention=convention, expected=expected)


def tabled(gate: str, convention: str, k: int) -> str:
    return f"{gate}, {convention}, k = {k}"


ARMS: dict[str, Settings] = {
    "linear": arm("linear"),
    **{tabled(*cell, k): of_table(*cell, k) for cell in DIGEST for k in (2, 3, 4)},
    "tau_1 alone": arm("perturbed", TAU, 0.0),
    "tau_2 alone": arm("perturbed", 0.0, TAU, expected=2),
    **{f"tau {tau:g}": arm("perturbed", tau, tau) for tau in TAUS},
}
PERTURBED, VANILLA = tabled("perturbed", "reference", 3), tabled("vanilla", "reference", 3)

# -- claims ----------------------------------------------------------------------------------------

WHOLE = "counts are whole numbers: half a direction tells one count from the next"
OURS = "our own"


def counted(name: str) -> Claim:
    """An arm has as many flat directions as the digest says, as the linear gate has none."""
    return equivalent(
        name,
        "linear",
        margin=0.5,
        metric="beyond",
        quote=f"{name}: {ARMS[name]['expected']} flat directions",
        number=str(ARMS[name]["expected"]),
        mark="5 §3",
        reason=WHOLE,
        tier=OURS,
    )


CLAIMS = [
    *(counted(name) for name in ARMS if "k =" in name),
    *(
        greater(
            tabled("perturbed", "reference", k),
            tabled("vanilla", "reference", k),
            margin=0.5,
            metric="flat",
            quote=f"adding to the norms removes flat directions, k = {k}",
            mark="5 §3",
            reason=WHOLE,
            tier=OURS,
        )
        for k in (2, 3, 4)
    ),
    equivalent(
        "tau_1 alone",
        PERTURBED,
        margin=0.5,
        metric="flat",
        quote="tau_1 alone removes what both remove",
        mark="5 §3.3",
        reason=WHOLE,
        tier=OURS,
    ),
    equivalent(
        "tau_2 alone",
        VANILLA,
        margin=0.5,
        metric="flat",
        quote="tau_2 alone removes nothing",
        mark="5 §3.3",
        reason=WHOLE,
        tier=OURS,
    ),
    equivalent(
        "tau_2 alone",
        VANILLA,
        margin=1e-9,
        metric="radial",
        quote="with tau_2 alone the radial derivative stays zero, as for the vanilla gate",
        mark="5 §3.1, §3.3",
        reason="float64 leaves some 1e-16: it is zero, or it is not",
        tier=OURS,
    ),
    greater(
        "tau_1 alone",
        "tau_2 alone",
        margin=0.1,
        metric="radial",
        quote="tau_1 gives scores a radial derivative, s tau_1 / (‖b1‖ + tau_1)",
        mark="5 §3.2",
        reason=f"half of the least it can be of a score, {TAU} / (2 + {TAU}), as norms are 1 to 2",
        tier=OURS,
    ),
    equivalent(
        PERTURBED,
        VANILLA,
        margin=1e-9,
        metric="identity",
        quote="the formula of the radial derivative is exact for both",
        mark="5 §3.1, §3.2",
        reason="float64 leaves some 1e-16: it is exact, or it is not",
        tier=OURS,
    ),
    equivalent(
        "tau 0.01",
        "tau 0.001",
        margin=0.1,
        metric="over tau",
        quote="for small tau the smallest eigenvalue is proportional to tau squared",
        number="2.3e-8 / 2.4e-10",
        mark="5 §3.6",
        reason="an exponent of 2 ± 0.1 over one decade of tau",
        tier=OURS,
    ),
    *(
        greater(
            "tau 0.5",
            other,
            margin=margin,
            metric="smallest",
            quote=f"a tau of the order of the norms curves most: 0.5 against {other[4:]}",
            number=number,
            mark="5 §3.6",
            reason=reason,
            tier=OURS,
        )
        for other, margin, number, reason in (
            ("tau 0.01", 1.0, "7.2e-6 against 2.3e-8", "a factor of ten is ten times the data"),
            ("tau 3", 0.5, "7.2e-6 against 5.0e-7", "a factor of three is three times the data"),
        )
    ),
]

study = Study(
    name="cosine/identifiability",
    title="Flat directions of cosine gates, and what tau does to them",
    question="Which parameters of a mixture can be learned at all, and how does tau change it?",
    run=run,
    arms=ARMS,
    metrics=METRICS,
    scales={
        "smoke": Scale(seeds=2, settings={"draws": 2}),
        "small": Scale(seeds=20, settings={"draws": 5}),
        "full": Scale(seeds=50, settings={"draws": 20}),
    },
    claims=CLAIMS,
    varies=("true mixtures", "inputs"),
    paper=PAPER,
    deviations=[
        "only the paper's abstract was available: the tables are those of our digest, found by us "
        "before, and every setting is ours",
    ],
    notes=[
        f"mixtures: k tanh experts in {DIM} dimensions, drawn from a stated law (norms of gate "
        "vectors 1 to 2) with atoms kept apart; the draws of a seed are the same for arms of one k",
        f"flat: eigenvalues below {FLAT:g} of the largest, of the Gauss–Newton matrix on {POINTS} "
        "inputs, from singular values",
        "conventions: free, all gate vectors; reference, the last is 0 (e1 where length means "
        "nothing); direction, the same without lengths. The last bias is always 0",
        "choices: margins were set after a look at the digest's numbers and at a few other draws",
        "loss: flat directions away from the digest's count, on the mean of the draws so far",
    ],
)
