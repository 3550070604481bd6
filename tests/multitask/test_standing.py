"""What static gates decided is kept in inference, and never longer than it is true."""

import copy

import pytest
import torch
from samples import DIM, EXPERTS, feedforward
from torch import nn

import moiety
import moiety.multitask
from moiety.multitask.standing import Standing
from moiety.multitask.together import decide_apart
from moiety.multitask.union import mix, mix_weights

X = torch.randn(7, DIM)


class Gates:
    """Two gates and how often they were asked."""

    def __init__(self, name="top-k-static", **options):
        words = {"dim": DIM, "experts": EXPERTS, **options}
        self.routers = nn.ModuleList(moiety.build_router(name, **words) for _ in range(2)).eval()
        self.standing, self.asked = Standing(), 0

    def decide(self, x):
        self.asked += 1
        return decide_apart(list(self.routers), [{}, {}], x)

    def __call__(self, x=X):
        with torch.no_grad():
            return self.standing(self.routers, x, self.decide)


def test_asked_once_and_the_same_to_the_bit():
    gates, experts = Gates(), feedforward()
    with torch.no_grad():
        want = mix(experts, X, [router(X) for router in gates.routers])
        for _ in range(3):
            found, work = gates()
            weight, choice = found.weight_GTE, found.choice_GTE
            got = mix_weights(experts, X, weight, choice, found.routings, work=work)
            assert torch.equal(got, want)
    assert gates.asked == 1 and work.ids.tolist() == choice.any(0)[0].nonzero().flatten().tolist()


def replaced(gates):
    gates.routers[1].weight = nn.Parameter(torch.randn(EXPERTS))


def moved(gates):  # as `module.to` does
    gates.routers[1].weight.data = torch.randn(EXPERTS)


def loaded(gates):
    gates.routers[1].load_state_dict({"weight": torch.randn(EXPERTS)})


def stepped(gates):
    gates.routers[1].weight.grad = torch.randn(EXPERTS)
    torch.optim.SGD(gates.routers.parameters(), lr=1.0).step()


def through_data(gates):
    gates.routers[1].weight.data.copy_(torch.randn(EXPERTS))


@pytest.mark.parametrize("change", [replaced, moved, loaded, stepped, through_data])
def test_asked_anew_when_a_gate_has_changed(change):
    gates = Gates()
    gates()
    change(gates)
    found, _ = gates()
    assert gates.asked == 2
    torch.testing.assert_close(found.weight_GTE[1], gates.routers[1](X).dense()[:1])


def test_asked_anew_when_the_width_was_annealed():
    gates = Gates("dselect-k-static", width_steps=10)
    gates()
    for router in gates.routers.train():
        router(X)
    gates.routers.eval()
    gates()
    assert gates.asked == 2


def test_asked_anew_when_something_else_has_changed():
    gates, strength = Gates(), torch.zeros(())
    for step in range(2):
        with torch.no_grad():
            for _ in range(2):
                gates.standing(gates.routers, X, gates.decide, [strength])
        strength.fill_(1.0)
        assert gates.asked == step + 1


def test_asked_anew_when_an_option_was_set_by_hand():
    gates = Gates("dselect-k-static")
    gates()
    gates.routers[0].width = 0.01
    gates()
    assert gates.asked == 2


def test_another_number_of_examples():
    gates = Gates()
    assert gates()[0].routings[0].tokens == 7
    assert gates(X[:3])[0].routings[0].tokens == 3 and gates.asked == 2


def test_nothing_is_kept_where_gradients_or_training_could_change_it():
    gates = Gates()
    gates()
    found, work = gates.standing(gates.routers, X, gates.decide)  # with gradients
    assert work is None and found.weight_GTE.requires_grad
    gates()
    assert gates.asked == 2  # nothing has changed
    gates.routers.train()
    assert gates()[1] is None and gates()[1] is None and gates.asked == 4


def test_gates_by_example_and_gates_that_are_listened_to_are_always_asked():
    gates = Gates("top-k")
    assert gates()[1] is None and gates()[1] is None and gates.asked == 2
    gates = Gates()
    gates.routers[0].register_forward_hook(lambda *_: None)
    assert gates()[1] is None and gates()[1] is None and gates.asked == 2
    gates = Gates()
    gates.routers[1].register_forward_pre_hook(lambda *_: None)
    assert gates()[1] is None and gates()[1] is None and gates.asked == 2


def test_asked_anew_when_a_gate_of_another_kind_has_the_same_numbers():
    gates, words = Gates("softmax-static"), {"dim": DIM, "experts": EXPERTS}
    gates()
    other = moiety.build_router("top-k-static", **words, k=2).eval()
    other.load_state_dict(gates.routers[1].state_dict(), strict=False)
    gates.routers[1] = other
    assert (gates()[0].weight_GTE[1] > 0).sum() == 2


def test_what_was_kept_in_inference_mode_is_not_used_outside_it():
    gates = Gates()
    with torch.inference_mode():
        gates()
    assert not gates()[0].weight_GTE.is_inference()


def test_asked_anew_when_a_strength_was_set_by_hand():
    tasks = [moiety.multitask.Task(name, "number") for name in "ab"]
    model = moiety.multitask.MultiGate(tasks, feedforward(), router="dselect-k-static").eval()
    with torch.no_grad():
        before = model(X).terms["a"]["entropy"]
        model.balance[0]["entropy"] *= 2
        torch.testing.assert_close(model(X).terms["a"]["entropy"], 2 * before)


def test_a_copy_starts_without():
    gates = Gates()
    gates()
    assert gates.standing.kept is not None and copy.deepcopy(gates.standing).kept is None
