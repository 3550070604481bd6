"""Three backends, one sum: forward and gradients against a loop over single tokens."""

import pytest
import torch
from torch.nn import functional

from helpers import CASES, TIGHT, D, E, check_parity, close, feedforward, routing_of
from moiety import FeedForward, MoE

BACKENDS = ("loop", "grouped", "dense")
FORMS = [
    {"activation": "gelu"},
    {"activation": "silu", "gated": True},
    {"activation": "relu", "bias": False},
    {"activation": "silu", "gated": True, "bias": False},
    {"activation": "quick_gelu"},
    {"activation": "relu2", "gated": True},
    {"activation": "tanh", "out_dim": 11},
    {"activation": functional.softsign},
]


def name_of(value):
    return getattr(value, "__name__", str(value))


def run(backend, case, dtype=torch.float32, tokens=13, experts=E, k=2, dim=D, hidden=24, **options):
    made = feedforward(experts, dim, hidden, **options).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    routing = routing_of(case, tokens, experts, k, dtype=wide)
    check_parity(made, torch.randn(tokens, dim).to(dtype), routing, backend, TIGHT[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
def test_every_kind_of_routing(backend, case, dtype):
    run(backend, case, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(name_of, f.values())))
def test_every_form_of_expert(backend, form):
    run(backend, "inactive", **form)
    run(backend, "plain", torch.float64, **form)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TIGHT, ids=str)
def test_widths_that_are_no_multiple_of_16_bytes(backend, dtype):
    run(backend, "capacity", dtype, dim=7, hidden=9)
    run(backend, "plain", dtype, dim=16, hidden=3, gated=True)  # only the hidden width is odd
    run(backend, "plain", dtype, dim=16, hidden=16, out_dim=1)  # only the output is


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(backend, case, tokens):
    if case == "capacity" and tokens == 0:
        pytest.skip("a limit on nothing")
    run(backend, case, tokens=tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_and_all_experts(backend):
    run(backend, "plain", experts=1, k=1)
    run(backend, "plain", k=E)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_computes_in_bf16_from_fp32_weights(backend):
    made, x, routing = feedforward(gated=True), torch.randn(13, D), routing_of("capacity")
    x.requires_grad_()
    want = made(x, routing, "loop")
    up = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, [x, made.w_in, made.b_out, routing.weight], up)
    with torch.autocast("cpu", torch.bfloat16):
        got = made(x, routing, backend)
    assert got.dtype == torch.bfloat16
    close(got, want, 2e-2)
    grads = torch.autograd.grad(
        got, [x, made.w_in, made.b_out, routing.weight], up.to(torch.bfloat16)
    )
    for g, w in zip(grads, want_grads):
        assert g.dtype == torch.float32
        close(g, w, 3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_training_only(backend):
    plain, dropped = feedforward(), feedforward(dropout=0.5)
    dropped.load_state_dict(plain.state_dict())
    x, routing = torch.randn(13, D), routing_of("plain")
    want = plain(x, routing, backend)
    assert not torch.allclose(dropped(x, routing, backend), want, atol=1e-3)
    assert torch.equal(dropped.eval()(x, routing, backend), want)


def test_every_option_changes_the_output():
    x, routing = torch.randn(13, D), routing_of("plain")

    def output(**options):
        torch.manual_seed(7)
        return feedforward(**options)(x, routing)

    plain = output()
    for options in (
        {"activation": "relu"}, {"gated": True}, {"bias": False}, {"dropout": 0.3},
        {"same_init": True}, {"hidden": 25},
    ):  # fmt: skip
        assert not torch.allclose(output(**options), plain, atol=1e-4), options
    assert output(out_dim=3).shape == (13, 3)


def test_same_init_starts_all_experts_alike():
    made = feedforward(same_init=True)
    for p in made.parameters():
        assert torch.equal(p, p[:1].expand_as(p))
    assert not torch.equal(feedforward().w_in[0], feedforward().w_in[1])


def test_a_name_and_its_function_are_the_same():
    torch.manual_seed(1)
    by_name = feedforward(activation="gelu")
    torch.manual_seed(1)
    by_function = feedforward(activation=functional.gelu)
    x, routing = torch.randn(4, D), routing_of("plain", 4)
    assert torch.equal(by_name(x, routing), by_function(x, routing))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"activation": "swish2"}, "no activation is named 'swish2'"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"hidden": 0}, "hidden must be a whole number"),
        ({"experts": 0}, "experts must be a whole number"),
        ({"dim": 2.5}, "dim must be a whole number"),
        ({"out_dim": 0}, "out_dim must be a whole number"),
    ],
)
def test_wrong_options(wrong, says):
    with pytest.raises(ValueError, match=says):
        FeedForward(**{"experts": 4, "dim": 8, "hidden": 16, **wrong})


def test_wrong_backend_and_wrong_number_of_experts():
    made = feedforward()
    with pytest.raises(ValueError, match="no backend 'fast'; it has auto, loop, grouped, dense"):
        made(torch.randn(13, D), routing_of("plain"), "fast")
    with pytest.raises(ValueError, match="for 4 experts, but there are 5"):
        made(torch.randn(13, D), routing_of("plain", experts=4))


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_tokens_and_weights_of_different_types_are_refused_by_all(backend):
    layer = MoE("top-k", dim=8, hidden=16, experts=4, backend=backend)
    with pytest.raises(ValueError, match="tokens are bfloat16 and the experts float32"):
        layer(torch.randn(3, 8).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 8).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_answers_of_some_experts_or_all_to_every_token(gated, bias):
    experts = FeedForward(3, 4, 5, activation="relu", gated=gated, bias=bias, out_dim=2)
    x = torch.randn(7, 4)
    want = torch.stack(list(experts.loop([x] * 3)))
    assert want.shape == (3, 7, 2)
    for backend in ("loop", "grouped", "dense"):
        torch.testing.assert_close(experts.answers(x, None, backend), want)
        some = experts.answers(x, torch.tensor([0, 2]), backend)
        torch.testing.assert_close(some, want[[0, 2]])
        (gradient,) = torch.autograd.grad(some.sum(), experts.w_out)
        assert [bool(g.any()) for g in gradient] == [True, False, True]
