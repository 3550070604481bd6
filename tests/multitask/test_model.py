"""`MultiGate`: parity with a model written by hand, what is skipped, and what is refused."""

import math

import pytest
import torch
from samples import DIM, EXPERTS, TASKS, feedforward, gated, make_binary, problem
from torch import nn
from torch.nn import functional as F

import moiety
from moiety.multitask import MultiGate, Task, task_loss
from moiety.routing import balance

NAMES = moiety.list_routers()


class Counting(nn.Linear):
    calls, rows = 0, 0

    def forward(self, x):
        self.calls, self.rows = self.calls + 1, self.rows + len(x)
        return super().forward(x)


def counted(tasks=TASKS, **words):
    members = [Counting(DIM, 5) for _ in range(8)]
    model = MultiGate(tasks, moiety.ModuleExperts(members, dim=DIM, out_dim=5), **words)
    return model, members


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_loss_are_those_of_a_model_by_hand(name):
    model = gated(name, tower=7).eval()  # eval: no noise, so that the gates can be asked again
    x, targets = problem()
    outputs = model(x)
    want = torch.zeros(())
    experts = torch.stack(list(model.experts.loop([x] * EXPERTS)), 1)
    for task, router, tower in zip(TASKS, model.routers, model.towers, strict=True):
        routing = router(x)
        y = tower((experts * routing.dense()[..., None]).sum(1))
        torch.testing.assert_close(outputs[task.name], y, rtol=1e-4, atol=1e-5)
        target = targets[task.name]
        if task.kind == "classes":
            loss = F.cross_entropy(y, target)  # torch leaves -100 out
        elif task.kind == "labels":
            there = ~target.isnan()
            loss = F.binary_cross_entropy_with_logits(y[there], target[there])
        else:
            there = ~target.isnan()
            loss = F.mse_loss(y[there, 0], target[there])
        terms = balance.terms(routing, router.default_balance())
        want = want + task.weight * loss + sum(terms.values(), torch.zeros(()))
    torch.testing.assert_close(model.loss(outputs, targets), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_router_learns(name):
    torch.manual_seed(0)
    model = gated(name)
    x, targets = problem()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model.loss(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_balance_of_every_task_counts():
    x, targets = problem()
    light, heavy = (gated(balance={"entropy": w}) for w in (0.0, 1.0))
    heavy.load_state_dict(light.state_dict())
    gap = heavy.loss(heavy(x), targets) - light.loss(light(x), targets)
    entropy = sum(r.penalties["entropy"] for r in light(x).routings.values())
    torch.testing.assert_close(gap, entropy)
    with pytest.raises(ValueError, match="no balance loss is named 'switsch'"):
        gated(balance={"switsch": 1.0})


# -- conditional execution ------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_a_binary_static_gate_calls_only_the_selected_and_each_once(training):
    tasks = [Task("a", size=2), Task("b", "number")]
    model, members = counted(tasks, k=2)
    make_binary(model, [(1, 6), (6, 3)])
    outputs = model.train(training)(torch.randn(9, DIM))
    assert [m.calls for m in members] == [0, 1, 0, 1, 0, 0, 1, 0]
    model.loss(outputs, {"a": torch.zeros(9, dtype=torch.long), "b": torch.zeros(9)}).backward()
    used = [bool(m.weight.grad.any()) for m in members]
    assert used == [False, True, False, True, False, False, True, False]


def test_in_training_a_gate_that_is_not_binary_calls_all_and_each_once():
    model, members = counted(k=2)
    model(torch.randn(9, DIM))
    assert [m.calls for m in members] == [1] * 8


@pytest.mark.parametrize("training", [False, True])
def test_by_example_an_expert_sees_only_the_examples_of_some_task(training):
    model, members = counted(router="top-k", k=1)
    outputs = model.train(training)(torch.randn(50, DIM))
    needed = torch.stack([r.choice() for r in outputs.routings.values()]).any(0).sum(0)
    assert [m.rows for m in members] == needed.tolist()
    assert needed.sum() < 150  # some examples share an expert between tasks


def test_in_inference_static_gates_are_asked_once():
    model, x = make_binary(gated(), [(1, 2), (2, 3), (1, 3)]).eval(), torch.randn(9, DIM)
    asked = []
    for router in model.routers:
        route = router.route
        router.route = lambda *words, own=route: asked.append(1) or own(*words)
    with torch.no_grad():
        first, second = model(x), model(x)
        assert len(asked) == 3 and all(torch.equal(first[name], second[name]) for name in first)
        make_binary(model, [(0, 1), (4, 5), (4, 4)])
        assert not torch.equal(model(x)["a"], first["a"])
        assert sorted(model(x).routings["c.d"].choice()[0].nonzero().flatten().tolist()) == [4]
    model(x)["a"].sum().backward()  # with gradients they are asked again, and learn
    assert model.routers[0].alpha.grad is not None


def test_flops_fall_when_the_gates_become_binary():
    model, x = gated(), torch.randn(12, DIM)
    before = model.flops(x)
    make_binary(model, [(1, 2), (2, 3), (1, 3)])
    towers = sum(2 * 12 * DIM * task.outputs for task in TASKS)
    expert = 2 * 12 * (DIM * 8 + 8 * DIM)
    mixing = [2 * 12 * DIM * len(TASKS) * used for used in (EXPERTS, 3)]
    assert before == EXPERTS * expert + towers + mixing[0]
    assert model.flops(x) == 3 * expert + towers + mixing[1]
    assert model.training


@pytest.mark.parametrize("backend", ["loop", "grouped", "dense"])
def test_backends_agree(backend):
    model, x = make_binary(gated(), [(1, 2), (2, 3), (1, 3)]), torch.randn(12, DIM)
    want = model(x)
    model.backend = backend
    for name, y in model(x).items():
        torch.testing.assert_close(y, want[name])


@pytest.mark.parametrize("name", ["dselect-k-static", "top-k"])
def test_compiled_it_is_the_same(name):
    model = gated(name)
    x, targets = problem()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run in (model, compiled):
        loss = model.loss(run(x), targets)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- parts ----------------------------------------------------------------------------------------


def test_convolutions_as_experts():
    def cnn():
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))

    modules = [cnn() for _ in range(4)]
    model = MultiGate(TASKS, modules, router="top-k-static", k=2, dim=(1, 6, 6))
    x = torch.randn(7, 1, 6, 6)
    outputs = model(x)
    gate = outputs.routings["a"].dense()
    want = sum(gate[:, e, None] * m(x) for e, m in enumerate(modules))
    torch.testing.assert_close(outputs["a"], model.towers[0](want))


def test_an_encoder_of_transformers_as_trunk():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    batch = {"input_ids": torch.randint(0, 20, (3, 5)), "attention_mask": torch.ones(3, 5).long()}
    for pooled in (True, False):
        bert = transformers.BertModel(config, add_pooling_layer=pooled).eval()
        model = gated(trunk=bert).eval()
        found = bert(**batch)
        h = found.pooler_output if pooled else found.last_hidden_state[:, 0]
        want = gated().eval()
        want.load_state_dict({n: t for n, t in model.state_dict().items() if "trunk" not in n})
        torch.testing.assert_close(model(batch)["a"], want(h)["a"])


def test_a_trunk_of_several_inputs_and_one_that_gives_nonsense():
    class Two(nn.Module):
        def forward(self, a, b):
            return torch.cat([a, b], 1)

    x = torch.randn(4, DIM)
    model = gated(trunk=Two())
    torch.testing.assert_close(model((x[:, :3], x[:, 3:]))["a"], gated_like(model)(x)["a"])
    with pytest.raises(ValueError, match="the trunk must give a tensor"):
        gated(trunk=nn.LSTM(DIM, DIM))(torch.randn(4, DIM))
    with pytest.raises(ValueError, match="without a trunk, x must be a tensor"):
        gated()({"x": x})


def gated_like(model):
    plain = gated()
    plain.load_state_dict(model.state_dict())
    return plain


def test_towers_by_widths_by_function_and_by_name():
    assert [type(m).__name__ for m in gated(tower=[4, 5]).towers[0]] == [
        "Linear", "ReLU", "Linear", "ReLU", "Linear",
    ]  # fmt: skip
    made = gated(tower=lambda task: nn.Linear(DIM, task.outputs, bias=False))
    assert made.towers[2].weight.shape == (1, DIM)
    named = {task.name: nn.Linear(DIM, task.outputs) for task in TASKS}
    assert gated(tower=named).towers[1] is named["type"]


def test_uncertainty_by_hand():
    model = gated(weighting="uncertainty", balance={})
    with torch.no_grad():
        model.log_variance.copy_(torch.tensor([0.5, -0.2, 0.1]))
    x, targets = problem()
    outputs = model(x)
    s = [0.5, -0.2, 0.1]
    alone = [task_loss(t, outputs[t.name], targets[t.name]).item() for t in TASKS]
    want = math.exp(-0.5) * alone[0] + s[0] / 2 + math.exp(0.2) * alone[1] + s[1] / 2
    want += 0.3 * (math.exp(-0.1) * alone[2] / 2 + s[2] / 2)
    assert model.loss(outputs, targets).item() == pytest.approx(want, rel=1e-5)


def test_without_labels_a_task_moves_nothing_of_its_own():
    model = gated(weighting="uncertainty", balance={})
    x, targets = problem()
    targets["a"] = torch.full_like(targets["a"], -100)
    model.loss(model(x), targets).backward()
    assert not any(p.grad.any() for p in model.towers[0].parameters())
    assert not any(p.grad.any() for p in model.routers[0].parameters())
    assert model.log_variance.grad[0] == 0 and model.log_variance.grad[1:].all()


def test_sample_weights_for_all_or_by_task():
    model = gated(balance={})
    x, targets = problem()
    outputs, weight = model(x), torch.rand(44)
    every = model.loss(outputs, targets, weight)
    by_task = model.loss(outputs, targets, {task.name: weight for task in TASKS})
    torch.testing.assert_close(every, by_task)
    only = model.loss(outputs, targets, {"a": weight})
    assert not torch.allclose(every, only)
    with pytest.raises(ValueError, match="sample_weights has 'b'"):
        model.loss(outputs, targets, {"b": weight})


def test_metrics_of_all_tasks():
    model = gated().eval()
    x, targets = problem()
    found = model.metrics(model(x), targets)
    assert set(found) == {"a", "type", "c.d"} and set(found["c.d"]) == {"rmse", "r2"}


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"router": "dselekt"}, "no router is named"),
        ({"router": "softmax", "k": 2}, "has no option 'k'"),
        ({"width": -1.0}, "width must be"),
        ({"tower": {"a": nn.Identity()}}, "tower lacks task 'type'"),
        ({"tower": 0}, "tower must be"),
        ({"tower": nn.Linear(2, 2)}, "tower must be"),
        ({"weighting": "grad"}, "weighting must be one of"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"log": (0, 1)}, "points must be"),
        ({"dim": 3}, "does not fit"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        gated(**words)


def test_built_routers_by_task():
    def built(experts=EXPERTS, **more):
        names = [*(task.name for task in TASKS), *more]
        return {n: moiety.build_router("top-k", dim=DIM, experts=experts) for n in names}

    routers = built()
    assert list(gated(routers).routers) == list(routers.values())
    with pytest.raises(ValueError, match="with built routers, k belong"):
        gated(routers, k=2)
    with pytest.raises(ValueError, match="router has 'd'"):
        gated(built(d=1))
    with pytest.raises(ValueError, match="task 'a' is for 7 experts of width 16"):
        gated(built(7))
    routers["type"].needs_ids = True
    with pytest.raises(ValueError, match="needs token ids, and examples have none"):
        gated(routers)


def test_wrong_experts_and_tasks():
    with pytest.raises(ValueError, match="dim must say the shape"):
        MultiGate(TASKS, [nn.Linear(DIM, 5)])
    with pytest.raises(ValueError, match="an Experts object or a list of modules"):
        MultiGate(TASKS, 8, dim=DIM)
    with pytest.raises(ValueError, match="two tasks are named 'a'"):
        MultiGate([TASKS[0], TASKS[0]], feedforward())
    with pytest.raises(ValueError, match="at least one"):
        MultiGate([], feedforward())
    with pytest.raises(ValueError, match="must be Task values, got str"):
        MultiGate(["a"], feedforward())


def test_more_towers_than_targets_and_the_other_way():
    towers = {**{task.name: nn.Linear(DIM, task.outputs) for task in TASKS}, "d": nn.Identity()}
    with pytest.raises(ValueError, match=r"tower has 'd', but the tasks are a, type, c\.d"):
        gated(tower=towers)
    model = gated()
    x, targets = problem()
    with pytest.raises(ValueError, match="targets has 'd'"):
        model.loss(model(x), {**targets, "d": targets["a"]})
    with pytest.raises(ValueError, match=r"targets lacks task 'c\.d'"):
        model.loss(model(x), {name: targets[name] for name in ("a", "type")})
    with pytest.raises(ValueError, match="targets must be tensors by task name"):
        model.loss(model(x), targets["a"])
    with pytest.raises(ValueError, match="the tower of task 'a' gives 2 values, not 3"):
        gated(tower=lambda task: nn.Linear(DIM, 2))(x)
    with pytest.raises(ValueError, match="the experts take 16 values an example, got 15"):
        model(x[:, 1:])


@pytest.mark.parametrize("name", ["top-k", "top-k-static"])
def test_a_nan_column_is_named(name):
    x, _ = problem()
    x[:, 3], x[0, 5] = math.nan, math.inf
    with pytest.raises(ValueError, match="column 3 of x is NaN or infinite in 44 of 44 examples"):
        gated(name)(x)
