"""The layer: how it is built, what it takes, who is dropped, and that it repeats itself."""

import copy
import inspect
import re
import warnings

import pytest
import torch
from torch import nn

import moiety
from helpers import D, E, F, feedforward, lowrank, modules
from moiety import FeedForward, LowRank, ModuleExperts, MoE, build_router, watch


def layer_of(router="top-k", seed=0, **options):
    torch.manual_seed(seed)
    return MoE(router, **{"dim": D, "hidden": F, "experts": E, **options})


# -- construction ------------------------------------------------------------------------------


def test_short_and_long_form_build_the_same():
    torch.manual_seed(3)
    router = build_router("top-k", dim=D, experts=E, k=3, renormalise=False)
    long = MoE(router, FeedForward(E, D, F, activation="silu", gated=True, bias=False))
    short = layer_of(seed=3, k=3, renormalise=False, activation="silu", gated=True, bias=False)
    assert [n for n, _ in short.named_parameters()] == [n for n, _ in long.named_parameters()]
    x = torch.randn(7, D)
    assert torch.equal(short(x), long(x))


def test_switch_and_expert_choice_get_their_own_capacity():
    layer = layer_of("switch", capacity_factor=0.5, overflow="priority")
    assert (layer.router.capacity_factor, layer.router.overflow) == (0.5, "priority")
    assert layer.capacity_factor is None  # not limited twice
    assert not layer.causal
    assert layer_of("switch").router.capacity_factor == 1.25
    layer = layer_of("expert-choice", capacity_factor=1.0)
    assert layer.router.capacity_factor == 1.0
    assert int(layer.route(torch.randn(10, D)).load().sum()) == 10
    assert layer_of("top-k", capacity_factor=0.5).capacity_factor == 0.5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kk": 3}, "has no option 'kk'; it has k, renormalise"),
        ({"router": "top-kk"}, "did you mean top-k"),
        ({"k": E + 1}, "there are only 5"),
        ({"hidden": None}, "short form of MoE needs hidden"),
        ({"dim": None, "experts": None}, "needs dim, experts"),
        ({"backend": "fast"}, "backend must be one of auto, loop, grouped, dense"),
        ({"overflow": "random"}, 'overflow must be "order" or "priority"'),
        ({"capacity_factor": 0.0}, "capacity_factor must be a positive number"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be a positive number"),
        ({"capacity_factor": "1"}, "capacity_factor must be a positive number"),
        ({"group": True}, "group must be None"),
        ({"balance": "switch"}, "balance must be weights by name"),
        ({"group": 0}, "group must be None"),
        ({"group": "batch"}, "group must be None"),
        ({"balance": {"swich": 0.1}}, "no balance loss is named 'swich'"),
        ({"balance": {"switch": float("inf")}}, "must be a finite number"),
        ({"activation": "gellu"}, "no activation is named 'gellu'"),
    ],
    ids=str,
)
def test_wrong_arguments(wrong, says):
    with pytest.raises(ValueError, match=says):
        layer_of(**wrong)


def test_parts_that_do_not_fit():
    with pytest.raises(ValueError, match="router is for 4 experts of width 16"):
        MoE(build_router("top-k", dim=D, experts=4), feedforward())
    with pytest.raises(ValueError, match="experts must be an Experts object, got NoneType"):
        MoE(build_router("top-k", dim=D, experts=E))
    with pytest.raises(ValueError, match="hidden, gated belong to their constructors"):
        MoE(build_router("top-k", dim=D, experts=E), feedforward(), gated=True, hidden=3)


# -- input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (2, 3, 4), (0,), (2, 0)], ids=str)
def test_any_leading_shape(lead):
    layer = layer_of(out_dim=3)
    x = torch.randn(*lead, D)
    y = layer(x)
    assert y.shape == (*lead, 3)
    torch.testing.assert_close(y.reshape(-1, 3), layer(x.reshape(-1, D)))
    mask = torch.rand(lead) < 0.5
    y = layer(x, mask=mask)
    assert y.shape == (*lead, 3)
    assert not y[~mask].any()  # padding is nobody's work
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_transposed_input():
    layer, x = layer_of(), torch.randn(D, 3, 2).permute(2, 1, 0)
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def test_wrong_input():
    layer, x = layer_of(), torch.randn(2, 3, D)
    with pytest.raises(ValueError, match=r"expected x of shape \[..., 16\], got \[2, 3, 8\]"):
        layer(x[..., :8])
    with pytest.raises(ValueError, match=r"expected x of shape \[..., 16\], got \[\]"):
        layer(torch.tensor(1.0))
    for word in ("mask", "ids"):
        with pytest.raises(ValueError, match=rf"{word} must have the shape \[2, 3\]"):
            layer(x, **{word: torch.ones(6, dtype=torch.long)})
    with pytest.raises(ValueError, match="mask must be bool or integer"):
        layer(x, mask=torch.zeros(2, 3))  # an additive mask would read inside out
    with pytest.raises(ValueError, match="NaN or infinite"):
        layer(torch.full((2, 3, D), float("nan")))


def test_a_mask_of_zeros_and_ones_is_a_mask():
    layer, x = layer_of(), torch.randn(2, 3, D)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(layer(x, mask=mask), layer(x, mask=mask.bool()))


def test_ids_reach_the_router():
    layer, x = layer_of("hash"), torch.randn(2, 3, D)
    ids = torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert torch.equal(layer(x, ids=ids), layer(x, ids=ids))
    chosen = layer.route(x.reshape(-1, D), ids=ids.flatten()).index.flatten().tolist()
    assert chosen == [*chosen[:3], *chosen[:3][::-1]]
    assert not torch.equal(layer(x, ids=ids), layer(x, ids=ids + 1))


# -- capacity ------------------------------------------------------------------------------------


def steered(scores_TE, k=1, **options):
    """A layer whose router's scores are the tokens themselves."""
    experts = scores_TE.shape[-1]
    options = {"renormalise": False, **options}  # or a first choice would always weigh one
    layer = MoE("top-k", dim=experts, hidden=4, experts=experts, k=k, **options)
    layer.router.weight.data = torch.eye(experts)
    return layer


def kept(layer, x, mask=None):
    """Which first choices are worked on, in the shape of the tokens."""
    lead = x.shape[:-1]
    flat = None if mask is None else mask.reshape(-1)
    routing = layer.route(x.reshape(-1, x.shape[-1]), flat, None, lead)
    active = routing.active[:, 0]
    if routing.mask is not None:
        assert not (active & ~routing.mask).any()
        assert not (routing.dropped[:, 0] & ~routing.mask).any()
    return active.view(lead).int().tolist()


# Four examples of two tokens; everybody wants expert 0, more so the later they come.
WANT_0 = torch.stack([torch.arange(1.0, 9.0), torch.zeros(8)], 1).view(4, 2, 2)


def test_capacity_drops_the_last_of_the_whole_batch():
    # ceil(8 tokens · 1 · 0.5 / 2 experts) = 2 slots, for the two first tokens.
    assert kept(steered(WANT_0, capacity_factor=0.5), WANT_0) == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_group_says_who_shares_a_capacity():
    # One example of 2 tokens: ceil(2 · 0.5 / 2) = 1 slot each.
    layer = steered(WANT_0, capacity_factor=0.5, group="example")
    assert kept(layer, WANT_0) == [[1, 0]] * 4
    assert kept(steered(WANT_0, capacity_factor=0.5, group=1), WANT_0) == [[1, 0]] * 4
    # Two examples share ceil(4 · 0.5 / 2) = 1 slot; three share ceil(6 · 0.25) = 2, the last has 1.
    layer = steered(WANT_0, capacity_factor=0.5, group=2)
    assert kept(layer, WANT_0) == [[1, 0], [0, 0], [1, 0], [0, 0]]
    layer = steered(WANT_0, capacity_factor=0.5, group=3)
    assert kept(layer, WANT_0) == [[1, 1], [0, 0], [0, 0], [1, 0]]
    # Without a length axis a token is an example: each has ceil(0.25) = 1 slot.
    assert kept(layer_with(group="example"), WANT_0.view(8, 2)) == [1] * 8


def layer_with(**options):
    return steered(WANT_0, capacity_factor=0.5, **options)


def test_priority_keeps_the_surest():
    assert kept(layer_with(overflow="priority"), WANT_0) == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert kept(layer_with(overflow="priority", group="example"), WANT_0) == [[0, 1]] * 4
    assert layer_with().causal
    assert not layer_with(overflow="priority").causal
    # Selectors are not slots: until they are binary, every expert works for every token.
    assert not layer_of("dselect-k", k=1, capacity_factor=1.0).causal
    assert layer_of("dselect-k", k=1, slots=1, capacity_factor=1.0).causal
    assert MoE(build_router("switch", dim=D, experts=E), feedforward(), capacity_factor=1.0).causal


def test_first_choices_go_before_second_ones():
    # Tokens 0, 1 prefer expert 0 and then 1; token 2 the other way round. One slot each.
    x = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    routing = steered(x, k=2, capacity_factor=0.3).route(x)  # ceil(3 · 2 · 0.3 / 2) = 1
    assert routing.active.tolist() == [[True, False], [False, False], [True, False]]
    assert routing.drop_rate() == pytest.approx(4 / 6)


def test_dropped_tokens_answer_zero():
    y = layer_with()(WANT_0).reshape(8, -1)
    assert y[:2].any(1).all()
    assert not y[2:].any()


@pytest.mark.parametrize("overflow", ["order", "priority"])
@pytest.mark.parametrize("router", ["top-k", "softmax", "switch", "expert-choice"])
def test_padding_left_or_right_changes_nothing(router, overflow):
    options = {"group": "example", "balance": {"switch": 1.0, "importance": 1.0, "z": 1.0}}
    if router != "expert-choice":
        options |= {"capacity_factor": 0.6, "overflow": overflow}
    layer = layer_of(router, **options).eval()
    x, junk = torch.randn(3, 5, D), torch.randn(3, 4, D)
    pad = torch.zeros(3, 4, dtype=torch.bool)
    real = torch.ones(3, 5, dtype=torch.bool)
    seen = {}
    for side, parts, masks, keep in (
        ("none", [x], [real], slice(0, 5)),
        ("right", [x, junk], [real, pad], slice(0, 5)),
        ("left", [junk, x], [pad, real], slice(4, 9)),
    ):
        with watch(layer) as routes:
            y = layer(torch.cat(parts, 1), mask=torch.cat(masks, 1))
            loss = routes.loss()
        grads = torch.autograd.grad(y.square().sum() + loss, list(layer.parameters()))
        seen[side] = (y[:, keep], loss, routes.load()["moe"], *grads)
        assert routes.summary()["moe"].tokens == 15
    for side in ("right", "left"):
        for a, b in zip(seen[side], seen["none"]):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_padding_of_a_whole_batch_takes_no_capacity():
    # Two real tokens of eight: ceil(2 · 0.5 / 2) = 1 slot, and it goes to the first real one.
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask[2] = True
    assert kept(layer_with(), WANT_0, mask) == [[0, 0], [0, 0], [1, 0], [0, 0]]


# -- the other arguments --------------------------------------------------------------------------


def test_shared_is_added_for_every_token():
    shared = nn.Linear(D, D)
    plain, layer = layer_of(), layer_of(shared=shared)
    layer.experts.load_state_dict(plain.experts.state_dict())
    layer.router.load_state_dict(plain.router.state_dict())
    x = torch.randn(2, 3, D)
    torch.testing.assert_close(layer(x), plain(x) + shared(x))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=mask), shared(x))


def test_balance_default_given_and_none():
    assert layer_of("switch").balance == {"switch": 0.01}
    assert layer_of("switch", balance={}).balance == {}
    assert layer_of("switch", balance={"z": 0.5}).balance == {"z": 0.5}
    assert layer_of("top-k").balance == {}
    x = torch.randn(6, D)
    for weights in ({}, {"z": 0.0}, {"z": 2.0}):
        layer = layer_of(balance=weights)
        with watch(layer) as routes, torch.no_grad():
            layer(x)
            got = routes.loss()
            want = weights.get("z", 0.0) * moiety.balance.z(layer.route(x))
        assert float(got) == pytest.approx(float(want))


def test_a_loss_that_the_router_cannot_give_raises():
    with pytest.raises(ValueError, match="hash: the switch loss needs a gate distribution"):
        layer_of("hash", balance={"switch": 0.1})
    with pytest.raises(ValueError, match="top-k: there is no entropy term to weigh"):
        layer_of("top-k", balance={"entropy": 0.1})
    state = torch.get_rng_state()
    layer_of("noisy-top-k", balance={})
    plain = torch.get_rng_state()
    torch.set_rng_state(state)
    layer_of("noisy-top-k", balance={"load": 0.1})  # the trial draws nothing of the caller's
    assert torch.equal(plain, torch.get_rng_state())


def test_backend_changes_how_not_what():
    x = torch.randn(9, D)
    answers = {}
    for backend in ("auto", "loop", "grouped", "dense"):
        layer = layer_of(backend=backend)
        answers[backend] = layer(x)
        word = backend if backend != "auto" else "grouped"
        assert moiety.explain(layer).startswith(f"{word}: ")
    for y in answers.values():
        torch.testing.assert_close(y, answers["loop"])


def test_the_layers_gradients_agree_through_the_router():
    x = torch.randn(9, D, requires_grad=True)
    for options in ({}, {"capacity_factor": 0.5}, {"k": 1, "renormalise": False}):
        found = {}
        for backend in ("loop", "grouped", "dense"):
            layer = layer_of(backend=backend, **options)
            y = layer(x)
            found[backend] = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        for backend in ("grouped", "dense"):
            for a, b in zip(found[backend], found["loop"]):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# -- warnings ------------------------------------------------------------------------------------


def test_uncollected_losses_warn_once():
    layer, x = layer_of("switch"), torch.randn(6, D)
    with pytest.warns(UserWarning, match="nothing collects them"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)


@pytest.mark.parametrize("why", ["eval", "no_grad", "balance={}", "zero weight", "watched"])
def test_no_warning(why):
    options = {"balance={}": {"balance": {}}, "zero weight": {"balance": {"switch": 0.0}}}
    layer, x = layer_of("switch", **options.get(why, {})), torch.randn(6, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if why == "eval":
            layer.eval()(x)
        elif why == "no_grad":
            with torch.no_grad():
                layer(x)
        elif why == "watched":
            with watch(layer) as routes:
                layer(x)
                routes.loss()
        else:
            layer(x)


# -- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: layer_of(hidden=32), "grouped: grouped_mm, one call for many small experts"),
        (lambda: layer_of(hidden=8192), "loop: on a CPU large experts one after the other"),
        (lambda: layer_of().double(), "loop: .* since grouped_mm takes no float64"),
        (lambda: layer_of(hidden=7), "loop: .* multiples of 4 in float32"),
        (lambda: layer_of(backend="dense"), "dense: set on the layer"),
        (lambda: layer_of(hidden=32).bfloat16(), "grouped: grouped_mm"),
        (lambda: MoE(build_router("top-k", dim=D, experts=E), modules()), "loop: .* only run one"),
        (lambda: MoE(build_router("top-k", dim=D, experts=E), lowrank()), "grouped: grouped_mm"),
        (lambda: layer_of(out_dim=3), "loop: .* multiples of 4"),
    ],
)
def test_explain(layer, says):
    layer = layer()
    text = moiety.explain(layer)
    with pytest.MonkeyPatch.context() as patch:
        used = []
        for word in ("loop", "grouped", "dense"):
            run = getattr(layer.experts, word)

            def spy(*a, run=run, word=word):
                used.append(word)
                return run(*a)

            patch.setattr(layer.experts, word, spy)
        like = next(layer.experts.parameters())
        layer(torch.randn(1024, D, dtype=like.dtype))
    assert used == [text.split(":")[0]]  # it says what the layer then does
    assert re.match(says, text), text
    assert "1024 tokens" in text


@pytest.mark.parametrize("name", moiety.list_routers())
def test_explain_knows_the_slots_of_every_router(name):
    layer = layer_of(name, hidden=80)  # between few and many slots the choice of backend turns
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    said = moiety.explain(layer).split(":")[0]
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items()) and layer.training
    x = torch.randn(1024, D)
    routing = layer.eval().route(x)
    per_expert = routing.by_token().index.numel() / E
    assert said == ("loop" if per_expert * 80 >= 2**16 else "grouped")
    assert layer.experts.choose(x, routing)[0] == said


def test_explain_for_given_tokens_and_for_nonsense():
    layer = layer_of(hidden=2048)
    assert moiety.explain(layer, torch.zeros(2, 3, D)).startswith("grouped")
    assert "6 tokens of float32 on cpu" in moiety.explain(layer, torch.zeros(2, 3, D))
    assert moiety.explain(layer, torch.zeros(10000, D)).startswith("loop")
    with pytest.raises(ValueError, match="explain takes an MoE layer, got Linear"):
        moiety.explain(nn.Linear(2, 2))


# -- vmap and forward mode ------------------------------------------------------------------------


def stacked(layers):
    return torch.func.stack_module_state(layers)[0]


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.6}, {"gated": True}], ids=str)
@pytest.mark.parametrize("kind", ["feedforward", "modules"])
def test_many_seeds_at_once(options, kind):
    if kind == "modules":
        if "gated" in options:
            pytest.skip("not an option of modules")
        routers = [build_router("top-k", dim=D, experts=E) for _ in range(3)]
        layers = [MoE(r, ModuleExperts([nn.Linear(D, D) for _ in range(E)], dim=D), **options)
                  for r in routers]  # fmt: skip
    else:
        layers = [layer_of(seed=s, **options) for s in range(3)]
    x = torch.randn(7, D)

    def loss(params, x):
        return torch.func.functional_call(layers[0], params, (x,)).square().sum()

    params = stacked(layers)
    got = torch.func.vmap(loss, (0, None))(params, x)
    grads = torch.func.vmap(torch.func.grad(loss), (0, None))(params, x)
    for s, layer in enumerate(layers):
        want = layer(x).square().sum()
        torch.testing.assert_close(got[s], want)
        wants = torch.autograd.grad(want, list(layer.parameters()))
        for (name, _), w in zip(layer.named_parameters(), wants):
            torch.testing.assert_close(grads[name][s], w, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["feedforward", "modules", "low-rank"])
def test_forward_mode_agrees_with_finite_differences(kind):
    made = {"feedforward": feedforward(activation="tanh"), "modules": None, "low-rank": lowrank()}
    experts = made[kind] or ModuleExperts([nn.Linear(D, D) for _ in range(E)], dim=D)
    layer = MoE(build_router("top-k", dim=D, experts=E), experts).double()
    x, v = torch.randn(6, D, dtype=torch.float64), torch.randn(6, D, dtype=torch.float64)
    with torch.no_grad():
        want = (layer(x + 1e-6 * v) - layer(x - 1e-6 * v)) / 2e-6
    y, got = torch.func.jvp(layer, (x,), (v,))
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        assert moiety.explain(layer).startswith("dense: vmap and forward-mode AD")
        dual = torch.autograd.forward_ad.make_dual(x, v)
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    torch.testing.assert_close(tangent, want, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", moiety.list_routers())
def test_many_seeds_train_at_once(name):
    """Each with noise of its own, where there is noise."""
    layers = [layer_of(name, seed, balance={}) for seed in range(2)]
    params, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(6, D)

    def loss(params, buffers):
        y = torch.func.functional_call(layers[0], (params, buffers), (x,))
        return y.square().mean()

    run = torch.func.vmap(torch.func.grad(loss), randomness="different")
    assert all(g.isfinite().all() for g in run(params, buffers).values())


def test_torch_func_grad_without_vmap():
    layer, x = layer_of(), torch.randn(6, D)
    params = dict(layer.named_parameters())

    def loss(params):
        return torch.func.functional_call(layer, params, (x,)).square().sum()

    got = torch.func.grad(loss)({n: p.detach() for n, p in params.items()})
    want = torch.autograd.grad(layer(x).square().sum(), list(params.values()))
    for name, w in zip(params, want):
        torch.testing.assert_close(got[name], w)


def test_inference_mode_and_deepcopy():
    layer, x = layer_of("switch"), torch.randn(6, D)
    with torch.inference_mode():
        y = layer.eval()(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)


# -- the same numbers again -----------------------------------------------------------------------


def model_of(kind):
    torch.manual_seed(0)
    if kind == "modules":
        layers = [MoE(build_router("top-k", dim=D, experts=E), modules()) for _ in range(2)]
    else:
        options = {
            "grouped": {"backend": "grouped"},
            "loop": {"backend": "loop"},
            "dense": {"backend": "dense"},
            "capacity": {"capacity_factor": 0.7, "overflow": "priority"},
            "bias": {"backend": "grouped", "bias": True, "gated": True},
            "switch": {"router": "switch"},
            "sigmoid-balanced": {"router": "sigmoid-balanced"},
            "expert-choice": {"router": "expert-choice", "balance": {"z": 0.1}},
        }[kind]
        layers = [layer_of(seed=s, **options) for s in range(2)]
    return nn.Sequential(layers[0], nn.LayerNorm(D), layers[1])


@pytest.mark.parametrize(
    "kind",
    ["grouped", "loop", "dense", "capacity", "bias", "modules", "switch", "sigmoid-balanced",
     "expert-choice"],
)  # fmt: skip
def test_twenty_steps_repeat_to_the_bit(kind):
    def train():
        model = model_of(kind)
        adam = torch.optim.Adam(model.parameters(), 1e-2)
        draw = torch.Generator().manual_seed(5)
        for _ in range(20):
            x = torch.randn(33, D, generator=draw)
            with watch(model) as routes:
                loss = (model(x) - x.flip(0)).square().mean() + routes.loss()
            adam.zero_grad()
            loss.backward()
            adam.step()
        return model.state_dict()

    first, second = train(), train()
    start = model_of(kind).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert any(not torch.equal(v, start[n]) for n, v in first.items())


# -- parameter groups ----------------------------------------------------------------------------


def test_param_groups_are_disjoint_and_complete():
    inner = MoE(build_router("top-k", dim=D, experts=2), feedforward(2))  # a layer in an expert
    outer = MoE(
        build_router("softmax", dim=D, experts=2),
        ModuleExperts([inner, nn.Linear(D, D)], dim=D),
        shared=nn.Linear(D, D),
    )
    tied = layer_of()
    model = nn.Sequential(nn.Linear(D, D), outer, tied, tied)
    groups = moiety.param_groups(model)
    assert [g["name"] for g in groups] == ["router", "experts", "rest"]
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}
    routers = {id(p) for m in (inner, outer, tied) for p in m.router.parameters()}
    assert {id(p) for p in groups[0]["params"]} == routers
    rest = {id(p) for m in (model[0], outer.shared) for p in m.parameters()}
    assert {id(p) for p in groups[2]["params"]} == rest
    torch.optim.AdamW(groups, 1e-3)  # refuses a parameter that is in two groups
    assert len(moiety.param_groups(nn.Sequential(layer_of("hash")))) == 1  # nothing but experts


def test_low_rank_in_the_layer_trains_only_what_it_says():
    base = nn.Linear(D, D)
    layer = MoE(build_router("top-k", dim=D, experts=E), LowRank(base, E, D, 2))
    groups = {g["name"]: g["params"] for g in moiety.param_groups(layer)}
    assert any(p is base.weight for p in groups["experts"])
    x = torch.randn(5, D)
    layer(x).sum().backward()
    assert base.weight.grad is None


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, True),
        ({"capacity_factor": 0.5, "k": 1}, True),
        ({"capacity_factor": 0.5, "k": 2}, False),  # a later first choice beats a second one
        ({"capacity_factor": 0.5, "k": 1, "overflow": "priority", "renormalise": False}, False),
    ],
)
def test_causal_says_whether_later_tokens_matter(options, causal):
    changed = False
    for seed in range(8):
        torch.manual_seed(seed)
        layer = moiety.MoE("top-k", dim=16, hidden=16, experts=4, **options).eval()
        assert layer.causal is causal
        x = torch.randn(24, 16)
        later = torch.cat([x[:12], torch.randn(12, 16)])
        with torch.no_grad():
            changed |= not torch.allclose(layer(x)[:12], layer(later)[:12], atol=1e-6)
    assert changed is not causal


@pytest.mark.parametrize("name", moiety.list_routers())
@pytest.mark.parametrize("backend", ["loop", "grouped", "dense"])
def test_padding_may_hold_nan(name, backend):
    torch.manual_seed(0)
    layer = moiety.MoE(name, dim=16, hidden=16, experts=4, backend=backend)
    x, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    layer.eval()
    clean = layer(x.masked_fill(~mask[..., None], 0.0), mask)
    x = x.masked_fill(~mask[..., None], float("nan")).requires_grad_()
    with moiety.watch(layer) as routes:
        y = layer(x, mask)
        loss = y[mask].square().sum() + routes.loss()
    torch.testing.assert_close(y[mask], clean[mask])
    gradients = torch.autograd.grad(loss, [x, *layer.experts.parameters()])
    assert all(g.isfinite().all() for g in gradients)


def test_what_would_be_ignored_is_refused():
    for ignored in ({"overflow": "priority"}, {"group": "example"}, {"group": 2}):
        with pytest.raises(ValueError, match="set capacity_factor"):
            moiety.MoE("top-k", dim=16, hidden=16, experts=4, **ignored)
        moiety.MoE("top-k", dim=16, hidden=16, experts=4, capacity_factor=1.0, **ignored)
    moiety.MoE("expert-choice", dim=16, hidden=16, experts=4, group="example")
    with pytest.raises(ValueError, match="'top-k' has none"):
        moiety.MoE("top-k", dim=16, hidden=16, experts=4, balance={"load": 0.1})
    moiety.MoE("noisy-top-k", dim=16, hidden=16, experts=4, balance={"load": 0.1})


def test_no_option_has_two_owners():
    """In the short form an option of the experts would hide a router's of the same name."""
    experts = set(inspect.signature(moiety.FeedForward).parameters) - {"experts", "dim"}
    layer = {"hidden", "group", "shared", "balance", "backend"}
    for name in moiety.list_routers():
        assert not set(moiety.describe(name).options) & (experts | layer), name


def test_a_name_with_an_experts_object():
    experts = ModuleExperts([nn.Linear(16, 16) for _ in range(3)], dim=16)
    layer = moiety.MoE("top-k", experts, k=1)
    assert layer.router.experts == 3
    assert layer.router.k == 1
    assert layer(torch.randn(4, 16)).shape == (4, 16)
    with pytest.raises(ValueError, match="hidden belong to their constructors"):
        moiety.MoE("top-k", experts, hidden=8)
    with pytest.raises(ValueError, match="name or a Router, got NoneType"):
        moiety.MoE(None, experts)
    with pytest.raises(ValueError, match="experts must be an Experts object, got int"):
        moiety.MoE(layer.router, 8, hidden=128)


def test_a_router_that_returns_something_else():
    class Wrong(moiety.Router):
        def route(self, x_TD, mask, ids, group):
            return None

    with pytest.raises(TypeError, match=r"Wrong\.route must return a Routing, got NoneType"):
        Wrong(4, 2)(torch.randn(3, 4))


def test_near_misses_get_a_hint():
    with pytest.raises(ValueError, match="gated=True"):
        moiety.MoE("top-k", dim=16, hidden=16, experts=4, activation="swiglu")
    with pytest.raises(ValueError, match="shared must be a module, got int"):
        moiety.MoE("top-k", dim=16, hidden=16, experts=4, shared=3)
    with pytest.raises(ValueError, match="a module with MoE layers is wanted, got int"), watch(3):
        pass
    layer = moiety.MoE("top-k", dim=16, hidden=16, experts=4)
    with watch(layer) as routes:
        layer(torch.randn(2, 16))
    assert repr(routes) == "Routes(layers=['moe'], keep='load', calls=1)"
