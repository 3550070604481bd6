"""Any modules as experts: the same sum, no call without a token, a gradient for the idle."""

import pytest
import torch
from torch import nn

from helpers import TIGHT, D, E, check_parity, modules, reference, routing_of
from moiety import ModuleExperts, MoE, build_router


class Raises(nn.Linear):
    """An expert that must not be called."""

    def forward(self, x):
        raise AssertionError("an expert without tokens was called")


@pytest.mark.parametrize("backend", ["loop", "dense"])
@pytest.mark.parametrize(
    "case", ["plain", "empty", "one", "capacity", "nobody", "padding", "expert", "static"]
)
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
def test_parity(backend, case, dtype):
    # bf16 convolutions, against float64 ones, lose a little more than a product does.
    tol = 4e-2 if dtype == torch.bfloat16 else TIGHT[dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    routing = routing_of(case, dtype=wide)
    check_parity(modules().to(dtype), torch.randn(13, D).to(dtype), routing, backend, tol)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens):
    check_parity(modules(), torch.randn(tokens, D), routing_of("plain", tokens), "loop", 1e-5)


@pytest.mark.parametrize("case", ["empty", "capacity", "expert", "static", "nobody"])
def test_an_expert_without_tokens_is_not_called(case):
    routing = routing_of(case)
    idle = [e for e, n in enumerate(routing.load().tolist()) if n == 0]
    if case in ("empty", "static", "nobody"):
        assert idle
    parts = [Raises(D, D) if e in idle else nn.Linear(D, D) for e in range(E)]
    made = ModuleExperts(parts, dim=D)
    y = made(torch.randn(13, D), routing)
    y.sum().backward()
    assert all(p.grad is not None for p in made.parameters())
    assert all(not p.grad.any() for e in idle for p in parts[e].parameters())


def test_an_expert_whose_slots_are_all_inactive_is_not_called():
    index = torch.tensor([[0, 1]] * 4)
    routing = routing_of("plain", 4, 2)
    active = torch.tensor([[True, False]] * 4)
    routing = routing.replace(index=index, active=active)
    made = ModuleExperts([nn.Linear(D, D), Raises(D, D)], dim=D)
    assert torch.isfinite(made(torch.randn(4, D), routing)).all()
    layer = MoE(build_router("top-k", dim=D, experts=2), made)
    layer(torch.randn(4, D), mask=torch.zeros(4, dtype=torch.bool))  # padding only
    with pytest.raises(AssertionError, match="was called"):
        made(torch.randn(4, D), routing.replace(active=None))


def test_out_dim_and_shape():
    parts = [nn.Linear(D, 3) for _ in range(E)]
    routing = routing_of("plain")
    assert ModuleExperts(parts, dim=D, out_dim=3)(torch.randn(13, D), routing).shape == (13, 3)
    with pytest.raises(ValueError, match="answered with 3 values a token, not out_dim = 16"):
        ModuleExperts(parts, dim=D)(torch.randn(13, D), routing)
    with pytest.raises(ValueError, match="does not hold dim = 16 values"):
        ModuleExperts(parts, dim=D, shape=(3, 4))
    with pytest.raises(ValueError, match="at least one module"):
        ModuleExperts([], dim=D)


def test_the_grouped_backend_is_refused_where_the_layer_is_made():
    with pytest.raises(ValueError, match="one of auto, loop, dense for ModuleExperts"):
        MoE(build_router("top-k", dim=D, experts=E), modules(), backend="grouped")


def test_autocast():
    made, x, routing = modules(), torch.randn(13, D), routing_of("capacity")
    want = reference(made, x, routing)
    with torch.autocast("cpu", torch.bfloat16):
        for backend in ("loop", "dense"):
            got = made(x, routing, backend)
            torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)


def test_modules_that_share_parameters_sum_their_gradients():
    one = nn.Linear(D, D)
    made, x, routing = ModuleExperts([one] * E, dim=D), torch.randn(13, D), routing_of("empty")
    made(x, routing).sum().backward()
    got = one.weight.grad.clone()
    one.weight.grad = None
    reference(made, x, routing).sum().backward()
    torch.testing.assert_close(got, one.weight.grad)


def test_answers_of_some_call_nobody_else_and_leave_them_a_zero_gradient():
    members = [torch.nn.Linear(4, 2) for _ in range(3)]
    experts, x = ModuleExperts(members, dim=4, out_dim=2), torch.randn(5, 4)
    some = experts.answers(x, torch.tensor([0, 2]))
    torch.testing.assert_close(some, torch.stack([members[0](x), members[2](x)]))
    some.sum().backward()
    assert members[0].weight.grad.any() and torch.equal(members[1].bias.grad, torch.zeros(2))
    assert experts.answers(x).shape == (3, 5, 2)
