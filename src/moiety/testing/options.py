"""Checks of options, descriptions and the messages for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..routing import Router, Routing, build_router, describe
from .contract import DIM, Case, call, descend, differing, need, objective, tokens
from .decision import well_formed

NONSENSE = "no such value"


def is_described(case: Case) -> None:
    """`describe` gives the paper, the equation, a summary and the meaning of every option."""
    found = describe(case.name)
    for word in ("paper", "equation", "summary"):
        need(getattr(found, word), f"its {word} is empty")
    for name, option in found.options.items():
        need(option.rule.doc, f"option {name} has no doc")
        need(case.name in str(found) and name in str(found), f"{name} is not printed")


def bad_options_are_refused(case: Case) -> None:
    """An unknown option and a value out of range raise one sentence that names them."""
    _refused(lambda: _build(case, {"no_such_option": 1}), "no_such_option")
    for name, option in describe(case.name).options.items():
        rule, wrong = option.rule, list[object]()
        if rule.low is not None:
            wrong += [rule.low - 1, float("nan"), NONSENSE]
        if isinstance(rule.low, int):
            wrong.append(rule.low + 1.0)  # whole, but not a whole number to what it is handed to
        if rule.high is not None:
            wrong.append(rule.high + 1)
        if rule.choices is not None or isinstance(option.default, bool):
            wrong.append(NONSENSE)
        for value in wrong:
            _refused(partial(_build, case, {name: value}), name, str(value))


def too_few_experts_are_refused(case: Case) -> None:
    """More choices than experts raise one sentence with both numbers, or are well defined."""
    if "k" not in describe(case.name).options:
        return
    try:
        router = _build(case, {"k": 9}).eval()
    except ValueError as error:
        one = "\n" not in str(error) and "9" in str(error) and "8" in str(error)
        need(one, f"k = 9 of 8 experts is refused with {str(error)!r}")
        return
    well_formed(call(router, tokens(7)), router, 7, torch.float32, "k = 9 of 8 experts: ")


def bad_input_is_refused(case: Case) -> None:
    """NaN and infinite tokens, a wrong width and a wrong mask raise one clear sentence."""
    router = case.build().eval()
    _refused(lambda: router(torch.zeros(3, DIM + 1)), str(DIM + 1))
    _refused(lambda: router(tokens(3), torch.ones(4, dtype=torch.bool)), "mask", "4")
    _refused(lambda: router(tokens(3), torch.ones(3)), "mask", "bool")
    if not differing(call(router, tokens(32)), call(router, tokens(32, seed=1))):
        return  # it never looks at the tokens
    for bad in (torch.nan, torch.inf):
        x_TD = tokens(3)
        x_TD[1] = bad
        _refused(partial(call, router, x_TD), case.name, "NaN")


def every_option_matters(case: Case) -> None:
    """Each option changes a decision, a penalty or a default loss within three steps of training.

    What a router merely stores does not count. An option that says nothing alone is tried with
    those that it declares in `given`.
    """
    known = describe(case.name).options
    for name, plain, changed in case.with_alternatives():
        alt = known[name].rule.alt
        other = alt is not None and alt != known[name].default
        need(other, f"option {name} declares no other value to try (Opt.alt)")
        need(_differ(plain, changed), f"option {name} is ignored: {alt!r} changes nothing")


def _differ(a: Case, b: Case) -> bool:
    """Whether two routers, of the same seed and on the same tokens, can be told apart."""
    if a.build().default_balance() != b.build().default_balance():
        return True
    return any(differing(one, other) for one, other in zip(_history(a), _history(b)))


def _history(case: Case) -> list[Routing]:
    """The decisions of three steps of training and of a call in eval after them."""
    router = case.build().train()
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        r = call(router, tokens(32, seed=step))
        seen.append(r.detach())
        descend(router, objective(r))
    return [*seen, call(router.eval(), tokens(32)).detach()]


def _build(case: Case, options: dict[str, object]) -> Router:
    return build_router(case.name, dim=DIM, experts=8, **{**case.options, **options})


def _refused(act: Callable[[], object], *words: str) -> None:
    """The act raises a ValueError of one line that holds these words."""
    try:
        act()
    except ValueError as error:
        told = str(error)
    else:
        raise AssertionError(f"no error, where one should name {' and '.join(words)}")
    missing = [word for word in words if word not in told]
    need(not missing, f"the message {told!r} does not name {', '.join(missing)}")
    need("\n" not in told, f"the message {told!r} is longer than a line")
