"""All checks, in the order in which they are made: what others rest on comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..experts import Experts
from . import coupling, decision, experts, losses, options, state
from .contract import Check, once, variants

# Made on the router as it is asked for.
ONCE = (
    options.is_described,
    options.bad_options_are_refused,
    options.too_few_experts_are_refused,
)
# Made also with each option's other value.
EACH = (
    decision.shapes_and_ranges,
    decision.weights_sum_as_declared,
    state.eval_is_deterministic,
    state.noise_as_declared,
    options.bad_input_is_refused,
    decision.static_as_declared,
    decision.dense_as_declared,
    decision.zero_vectors_are_defined,
    decision.ties_go_to_the_lower_id,
    coupling.causal_as_declared,
    coupling.groups_are_apart,
    coupling.padding_never_counts,
    coupling.noisy_losses_skip_padding,
    coupling.only_padding_is_defined,
    losses.losses_are_per_layer,
    losses.fp32_under_autocast,
    losses.fp32_in_a_half_model,
    losses.gradients_reach_parameters,
    losses.weights_carry_a_gradient,
    state.recomputation_changes_nothing,
    state.state_dict_round_trip,
    state.deepcopy_is_equal,
)
ROUTER = (
    *(Check(run, once) for run in ONCE),
    *(Check(run, variants) for run in EACH),
    Check(options.every_option_matters, once),
)
EXPERTS = tuple(
    Check(run, experts.built)
    for run in (
        experts.backends_agree,
        experts.backends_agree_in_bfloat16,
        experts.idle_experts_get_gradients,
        experts.repeats_are_equal,
        experts.inactive_slots_cost_nothing,
        experts.flops_are_counted,
        experts.copies_are_equal,
        experts.bad_calls_are_refused,
    )
)


def checks(of: Literal["router", "experts"] = "router") -> list[Check]:
    """The checks, to be called one by one with what `check_router` or `check_experts` takes."""
    lists = {"router": ROUTER, "experts": EXPERTS}
    if of not in lists:
        raise ValueError(f"there are checks of {', '.join(lists)}, not of {of!r}")
    return list(lists[of])


def check_router(name: str, **options: object) -> None:
    """Check a registered router, with its defaults and with each option's other value (`Opt.alt`).

    Options that are given here are held fixed. Raises AssertionError with the router, the first
    check that failed and what was seen.
    """
    if not isinstance(name, str):
        raise TypeError(f"check_router takes the name of a registered router, got {name!r}")
    for check in ROUTER:
        check(name, **options)


def check_experts(build: Callable[[int, int], Experts]) -> None:
    """Check the experts that `build(experts, dim)` makes, as `check_router` does a router."""
    for check in EXPERTS:
        check(build)
