"""Local Lipschitz constants against exact Jacobians; Lemma 1 for layers; whole models."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from moiety import ModuleExperts, MoE
from moiety.models import PatchTransformer
from moiety.robust.lipschitz import (
    jacobian_norm,
    layer_bound,
    local_lipschitz,
    measure_lipschitz,
    smooth_bound,
)
from moiety.robust.target import Target
from moiety.robust.theory import router_term

seeds = st.integers(0, 2**31)
some = settings(max_examples=10, deadline=None)


def network(seed=0, dim=6, out=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, out)).double()


def exact(f, x):
    """Spectral norms of Jacobians, one example after the other."""
    return torch.stack(
        [
            torch.linalg.matrix_norm(
                torch.autograd.functional.jacobian(lambda z: f(z[None])[0].flatten(), row).flatten(
                    1
                ),
                ord=2,
            )
            for row in x
        ]
    )


def layer(name="softmax", experts=4, dim=6, **words):
    return MoE(name, experts, dim=dim, hidden=8, activation=F.gelu, **words).double().eval()


# -- power iteration -----------------------------------------------------------------------------


@some
@given(seed=seeds)
def test_power_iteration_finds_the_norm_of_the_jacobian(seed):
    f, x = network(seed), torch.randn(5, 6, dtype=torch.float64)
    want = exact(f, x)
    assert torch.allclose(local_lipschitz(f, x, iterations=100), want, rtol=1e-2)
    assert torch.allclose(jacobian_norm(f, x), want, rtol=1e-10)


@some
@given(seed=seeds, few=st.integers(1, 5))
def test_an_estimate_is_never_too_large_and_grows_with_the_iterations(seed, few):
    f, x = network(seed), torch.randn(5, 6, dtype=torch.float64)
    less, more = (local_lipschitz(f, x, iterations=n) for n in (few, few + 3))
    assert (less <= more * (1 + 1e-12)).all() and (more <= exact(f, x) * (1 + 1e-9)).all()


def test_of_a_linear_map_it_is_the_largest_singular_value():
    w = torch.diag(torch.tensor([3.0, 1.0, 0.5]))
    found = local_lipschitz(lambda x: x @ w, torch.randn(4, 3))
    assert torch.allclose(found, torch.full((4,), 3.0), rtol=1e-5)


def test_no_example_changes_the_estimate_of_another():
    f, x = network(), torch.randn(6, 6, dtype=torch.float64)
    whole = local_lipschitz(f, x, iterations=400)
    assert torch.allclose(whole[:2], local_lipschitz(f, x[:2], iterations=400), rtol=1e-4)


def test_images_and_tokens_are_examples_of_any_shape():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    assert torch.allclose(local_lipschitz(model, x, iterations=200), exact(model, x), rtol=1e-3)
    f, tokens = network(), torch.randn(3, 5, 6, dtype=torch.float64)
    found = local_lipschitz(f, tokens, lead=2, iterations=200)
    assert found.shape == (3, 5)
    assert torch.allclose(found.flatten(), exact(f, tokens.flatten(0, 1)), rtol=1e-3)


def test_constants_have_none_and_a_kink_takes_the_slope_beside_it():
    x = torch.randn(3, 4)
    assert local_lipschitz(lambda z: torch.ones(3, 2), x).tolist() == [0, 0, 0]
    assert local_lipschitz(lambda z: 0 * z, x).tolist() == [0, 0, 0]
    assert jacobian_norm(lambda z: torch.ones(3, 2), x).tolist() == [0, 0, 0]
    x[1] = 0  # a square root of a sum of squares has the slope 0/0 there
    found = local_lipschitz(lambda z: z.square().sum(1, keepdim=True).sqrt(), x)
    assert torch.allclose(found, torch.ones(3), rtol=1e-3)


def test_where_an_operation_has_no_forward_derivative_two_backward_ones_do():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, given):
            return 3 * ctx.saved_tensors[0] ** 2 * given

    x = torch.tensor([[1.0, 2.0], [0.5, 0.1]])
    found = local_lipschitz(Cube.apply, x, iterations=100)
    assert torch.allclose(found, torch.tensor([12.0, 0.75]), rtol=1e-3)


def test_attention_and_a_sparse_layer_are_followed():
    torch.manual_seed(1)
    model = patches("top-k", k=2).double()
    x = torch.rand(2, 4, 4, dtype=torch.float64)
    assert torch.allclose(local_lipschitz(model, x, iterations=80), exact(model, x), rtol=2e-2)


def test_no_iteration_is_refused():
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        local_lipschitz(lambda z: z, torch.ones(1, 1), iterations=0)


# -- Lemma 1 -------------------------------------------------------------------------------------


@some
@given(seed=seeds, experts=st.integers(1, 4), shared=st.booleans())
def test_lemma_1_bounds_the_slope_of_our_smooth_layer(seed, experts, shared):
    torch.manual_seed(seed)
    moe = layer(experts=experts, shared=nn.Linear(6, 6) if shared else None)
    x = 2 * torch.randn(7, 6, dtype=torch.float64)
    bound = layer_bound(moe, x)
    assert (exact(moe, x) <= bound.total * (1 + 1e-9)).all()


def test_the_bound_is_broken_without_the_routers_term():
    torch.manual_seed(0)
    with torch.no_grad():  # experts that hardly slope, and disagree
        members = [nn.Linear(6, 2).double() for _ in range(4)]
        for i, member in enumerate(members):
            member.weight.mul_(0.01)
            member.bias.fill_(float(i))
    moe = MoE("softmax", ModuleExperts(members, dim=6, out_dim=2)).double()
    x = torch.randn(50, 6, dtype=torch.float64)
    bound, slope = layer_bound(moe, x), exact(moe, x)
    assert (slope <= bound.total * (1 + 1e-9)).all()
    assert (slope > bound.experts).double().mean() > 0.5


def test_the_routers_term_is_that_of_the_theory():
    torch.manual_seed(0)
    rows = torch.randn(3, 5, dtype=torch.float64)
    slopes = torch.randn(3, 5, dtype=torch.float64)
    x = torch.randn(8, 5, dtype=torch.float64)

    def gate(z):
        return (z @ rows.T).softmax(-1)

    def experts(z):
        return (z @ slopes.T).tanh()[..., None]

    bound = smooth_bound(gate, experts, x)
    assert torch.allclose(bound.router, router_term(gate(x), experts(x)[..., 0], rows), rtol=1e-9)
    local = (1 - (x @ slopes.T).tanh() ** 2) * slopes.norm(dim=1)
    assert torch.allclose(bound.experts, (gate(x) * local).sum(1), rtol=1e-9)


def test_a_noisy_router_is_bounded_without_its_noise_and_left_in_train_mode():
    moe, x = layer("noisy-top-k", k=2), torch.randn(8, 6, dtype=torch.float64)
    quiet = layer_bound(moe, x)
    moe.train()
    assert torch.equal(layer_bound(moe, x).total, quiet.total) and moe.router.training


def test_by_iterations_the_terms_are_nearly_those_of_exact_norms():
    torch.manual_seed(0)
    moe, x = layer(), torch.randn(6, 6, dtype=torch.float64)
    near, whole = layer_bound(moe, x, iterations=100), layer_bound(moe, x)
    for found, want in ((near.experts, whole.experts), (near.router, whole.router)):
        assert torch.allclose(found, want, rtol=1e-2) and (found <= want * (1 + 1e-9)).all()


# -- whole models --------------------------------------------------------------------------------


def patches(name, **words):
    def feedforward(dim):
        return MoE(name, 4, dim=dim, hidden=8, activation=F.gelu, **words)

    torch.manual_seed(0)
    return PatchTransformer(
        patches=4, patch_dim=4, classes=3, dim=8, depth=2, feedforward=feedforward
    ).eval()


@pytest.mark.parametrize("name", ["top-k", "softmax", "expert-choice", "sigmoid-balanced"])
def test_a_model_is_measured_end_to_end_and_layer_by_layer(name):
    model = patches(name).train()
    x = torch.rand(3, 4, 4)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    found = measure_lipschitz(Target(model), x)
    layers = [n for n, m in model.named_modules() if isinstance(m, MoE)]
    assert list(found["layers"]) == layers and len(layers) == 2
    assert 0 < found["end_to_end"]["median"] <= found["end_to_end"]["max"]
    for values in found["layers"].values():
        assert 0 < values["median"] <= values["max"]
        assert (values["jump"] is None) == (name in ("softmax", "expert-choice"))
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_layers_slope_is_that_of_its_tokens():
    model = patches("softmax").double()
    x = torch.rand(2, 4, 4, dtype=torch.float64)
    found = measure_lipschitz(Target(model), x, iterations=60)["layers"]
    name, moe = next((n, m) for n, m in model.named_modules() if isinstance(m, MoE))
    caught = []
    handle = moe.register_forward_pre_hook(lambda m, args: caught.append(args[0].detach()))
    model(x)
    handle.remove()
    want = exact(moe, caught[0].flatten(0, 1))
    assert found[name]["max"] == pytest.approx(float(want.max()), rel=1e-2)


def test_a_dense_model_has_an_end_to_end_constant_alone():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    found = measure_lipschitz(Target(model), torch.rand(3, 4, 4))
    assert found["layers"] == {}
    want = float(torch.linalg.matrix_norm(model[1].weight.detach(), ord=2))
    assert found["end_to_end"]["max"] == pytest.approx(want, rel=1e-2)


class Steep(nn.Module):
    """A slope without end below 0."""

    def forward(self, x):
        return x * torch.where(x[:, :1] > 0, 1.0, torch.inf)


def test_slopes_that_are_no_number_are_left_out():
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    found = measure_lipschitz(Target(Steep()), x)["end_to_end"]
    assert found == {"median": pytest.approx(1.0), "max": pytest.approx(1.0)}
    assert measure_lipschitz(Target(Steep()), x[1:])["end_to_end"] == {"median": None, "max": None}


def test_the_blocks_of_transformers_are_measured():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    words = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**words, **heads, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).eval()
    x = torch.randn(2, 5, 16)
    found = measure_lipschitz(Target(model), x, iterations=10)
    assert len(found["layers"]) == 2
    for values in found["layers"].values():
        assert 0 < values["median"] <= values["max"] and values["jump"] > 0
    target = Target(model)
    near = local_lipschitz(lambda z: target(z).logits, x, iterations=60)
    assert torch.allclose(near, jacobian_norm(lambda z: target(z).logits, x), rtol=2e-2)
