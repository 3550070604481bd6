"""The two terms of self-distillation, exactly as the digest has them."""

import warnings

import pytest
import torch
from rows import drawn, encoder, moved, rows, upcycled
from torch.nn import functional as F

import moiety
from moiety.adapt.mixtures import balance_losses, coupling
from moiety.adapt.objective import (
    Objective,
    prediction_error,
    representation_error,
    weight_error,
)
from moiety.adapt.teachers import frozen

KINDS = ("image", "text")
MATCHES = ("hidden", "cls", "prediction", "weights")


def gradients(encoder):
    return {n: p.grad for n, p in encoder.model.named_parameters() if p.grad is not None}


def prepared(kind):
    student = encoder(kind)
    student.model.eval()  # no dropout
    return student, moved(student), *drawn(student, rows(kind))


# -- what a term is ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match", MATCHES)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind, match):
    student, _, batch, masks = prepared(kind)
    objective = Objective(match=match, mae_weight=0.0)
    target = objective.target(student.copy(), batch, masks)
    assert float(objective.backward(student, batch, masks, target)["distill"]) == 0.0
    assert all(float(g.abs().max()) < 1e-6 for g in gradients(student).values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_class_token_is_summed_over_features_and_averaged_over_the_batch(kind):
    student, teacher, batch, masks = prepared(kind)
    objective = Objective(match="cls", mae_weight=0.0)
    told = objective.backward(student, batch, masks, objective.target(teacher, batch, masks))
    with torch.no_grad():
        ours, theirs = student.represent(batch).features, teacher.represent(batch).features
    by_hand = sum(float(((a[0] - b[0]) ** 2).sum()) for a, b in zip(ours, theirs)) / len(ours)
    assert float(told["distill"]) == pytest.approx(by_hand, rel=1e-5)


def test_hidden_is_the_mean_over_real_tokens_then_over_examples():
    wanted = torch.zeros(2, 3, 2)
    made = torch.tensor([[[1.0, 1], [2, 0], [9, 9]], [[3, 0], [9, 9], [9, 9]]])
    real = torch.tensor([[True, True, False], [True, False, False]])
    # First example: (2 + 4) / 2 = 3; second: 9; mean 6. Padding counts nowhere.
    assert float(representation_error(made, wanted, real)) == 6.0


def test_padding_counts_nowhere_whatever_stands_there():
    student, teacher, _, _ = prepared("text")
    texts = rows("text").items
    short, long = min(texts, key=len), max(texts, key=len)
    objective = Objective(match="hidden", mae_weight=0.0)

    def error(these, spoil=0.0):
        batch = student.batch(these)
        target = objective.target(teacher, batch, None)
        target.values[batch["attention_mask"] == 0] = spoil
        return float(objective.backward(student, batch, None, target)["distill"])

    alone = (error([short]) + error([long])) / 2
    assert error([short, long]) == pytest.approx(alone, rel=1e-5)
    assert error([short, long], spoil=torch.nan) == error([short, long])
    assert all(bool(g.isfinite().all()) for g in gradients(student).values())


def test_patches_in_another_order_are_another_representation():
    student, _, batch, _ = prepared("image")
    with torch.no_grad():
        seen = student.represent(batch)
    assert torch.equal(student.represent(batch).features, seen.features)  # no lot is drawn
    order = torch.tensor([0, *(torch.randperm(seen.features.shape[1] - 1) + 1)])
    assert float(representation_error(seen.features[:, order], seen.features, seen.real)) > 0.01
    with torch.no_grad():  # as transformers would shuffle them
        noise = torch.rand(len(seen.features), student.patches)
        student.trunk.embeddings.config.mask_ratio = 0.0
        shuffled = student.trunk(pixel_values=batch["pixel_values"], noise=noise)[0]
    assert float(representation_error(shuffled, seen.features, seen.real)) > 0.01


def test_predictions_are_compared_at_masked_places_only():
    for kind in KINDS:
        student, teacher, batch, masks = prepared(kind)
        with torch.no_grad():
            masked, wanted = student.masked(batch, masks), teacher.masked(batch, masks).predictions
        each = []
        for made, asked, where in zip(masked.predictions, wanted, masked.where):
            made, asked = made[where], asked[where]
            if kind == "image":
                each.append(((made - asked) ** 2).sum(-1).mean())
            else:
                p, log_q = asked.softmax(-1), made.log_softmax(-1)
                each.append((p * (p.log() - log_q)).sum(-1).mean())  # KL(teacher || student)
        error = prediction_error(kind, masked, wanted)
        assert float(error) == pytest.approx(float(torch.stack(each).mean()), rel=1e-4)
        wanted[~masked.where] += 1.0
        wanted[~masked.where, 0] += 5.0
        assert torch.equal(prediction_error(kind, masked, wanted), error)


def test_weights_are_compared_by_their_squares_or_by_their_largest_row():
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0], [0.5, 0.5]]))
        layer.bias.copy_(torch.tensor([0.0, -0.25]))
    zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    assert weight_error(layer, zero, "l2").item() == 5.5 + 0.0625
    assert weight_error(layer, zero, "mars").item() == 3.0 + 0.25
    layer.weight = torch.nn.Parameter(torch.ones(3, 2, 5))  # experts: a row for each output
    assert weight_error(layer, {**zero, "weight": torch.zeros(3, 2, 5)}, "mars").item() == 5.25


# -- who learns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match", ["hidden", "cls", "weights"])
def test_teacher_and_decoder_get_no_gradient_from_the_second_term(kind, match):
    student, teacher, batch, masks = prepared(kind)
    objective = Objective(match=match, mae_weight=0.0)
    objective.backward(student, batch, masks, objective.target(teacher, batch, masks))
    assert gradients(teacher) == {}
    got = gradients(student)
    assert got and not set(got) & set(student.groups().rest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match", MATCHES)
def test_a_step_has_the_gradient_of_the_weighted_sum(kind, match):
    student, teacher, batch, masks = prepared(kind)
    objective = Objective(match=match, mae_weight=0.3, distill_weight=0.7, distill_every=2)
    target = objective.target(teacher, batch, masks)
    objective.backward(student, batch, masks, target)
    got = gradients(student)
    student.model.zero_grad()
    masked, seen = student.masked(batch, masks), student.represent(batch)
    if match == "prediction":
        error = prediction_error(kind, masked, target.values)
    elif match == "weights":
        error = weight_error(student.trunk, target.weights, "l2")
    else:
        error = representation_error(objective.pick(seen.features), target.values, seen.real)
    (0.3 * masked.loss + 2 * 0.7 * error).backward()
    for name, gradient in gradients(student).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)


def test_without_a_target_there_is_the_masked_term_alone():
    student, _, batch, masks = prepared("text")
    told = Objective().backward(student, batch, masks)
    assert set(told) == {"masked"}
    got = gradients(student)
    student.model.zero_grad()
    student.masked_loss(batch, masks).backward()
    assert all(torch.equal(got[name], g) for name, g in gradients(student).items())


def test_which_steps_distil():
    assert [s for s in range(7) if Objective(distill_every=3).distills(s)] == [0, 3, 6]
    assert not any(Objective(distill_weight=0.0).distills(s) for s in range(7))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"match": "everything"}, "match must be one of hidden, cls, prediction, weights"),
        ({"norm": "l3"}, "norm must be one of l2, mars"),
        ({"norm": "mars"}, "norm is that of match='weights', and match is 'hidden'"),
        ({"mae_weight": -1.0}, "mae_weight must be 0 or more, got -1.0"),
        ({"distill_weight": float("nan")}, "distill_weight must be 0 or more, got nan"),
        ({"distill_every": 0}, "distill_every must be at least 1, got 0"),
        ({"mae_weight": 0.0, "distill_weight": 0.0}, "nothing would be learnt"),
        ({"match": "weights", "match_routing": 1.0}, "match_routing compares routers"),
    ],
)
def test_what_makes_no_sense_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        Objective(**words)


# -- mixtures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_balance_losses_count_once_and_on_the_masked_pass_alone(kind):
    student = upcycled(kind)
    batch, masks = drawn(student, rows(kind))
    objective, teacher = Objective(match="cls"), frozen(student.copy())
    target = objective.target(teacher, batch, masks)
    with balance_losses(student.model) as terms, torch.random.fork_rng():
        (student.masked(batch, masks).loss + sum(terms)).backward()
    wanted = router_gradients(student)
    assert len(terms) == sum(isinstance(m, moiety.MoE) for m in student.model.modules())
    assert max(wanted) > 0
    student.model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that nobody collects the losses
        with torch.random.fork_rng():
            objective.backward(student, batch, masks)
        assert router_gradients(student) == wanted
        student.model.eval()
        alone = []
        for objective in (Objective(match="cls", distill_weight=0.0), Objective(match="cls")):
            student.model.zero_grad()
            # The student is its teacher: the second term adds nothing, if no balance slips in.
            objective.backward(student, batch, masks, target)
            alone.append(router_gradients(student))
    assert alone[0] == alone[1]


@pytest.mark.parametrize("match", ["cls", "prediction"])
def test_without_a_masked_loss_experts_are_balanced_all_the_same(match):
    student = upcycled("text")
    student.model.eval()
    batch, masks = drawn(student, rows("text"))
    objective, teacher = Objective(match=match, mae_weight=0.0), frozen(student.copy())
    with balance_losses(student.model) as terms:
        if match == "cls":
            student.represent(batch)
        else:
            student.masked(batch, masks)
    sum(terms).backward()
    wanted = router_gradients(student)
    student.model.zero_grad()
    # The student is its teacher, so that the balance is all there is.
    objective.backward(student, batch, masks, objective.target(teacher, batch, masks))
    assert router_gradients(student) == pytest.approx(wanted, rel=1e-5) and max(wanted) > 0


def router_gradients(student):
    got = gradients(student)
    return [float(g.abs().sum()) for name, g in got.items() if ".router." in name]


def test_a_router_that_is_asked_seldom_is_asked_as_much_the_more():
    student = upcycled("text")
    student.model.eval()
    teacher = moved(student, by=0.2)
    batch, masks = drawn(student, rows("text"))
    found = []
    for every in (1, 3):
        objective = Objective(mae_weight=0.0, match_routing=0.5, distill_every=every)
        student.model.zero_grad()
        objective.backward(student, batch, masks, objective.target(teacher, batch, masks))
        found.append(router_gradients(student))
    assert found[1] == pytest.approx([3 * one for one in found[0]], rel=1e-5) and max(found[0]) > 0


def test_routers_are_kept_close_to_the_teachers():
    student = upcycled("text")
    student.model.eval()
    teacher = moved(student, by=0.2)
    batch, masks = drawn(student, rows("text"))
    objective = Objective(match="hidden", match_routing=0.5)
    told = objective.backward(student, batch, masks, objective.target(teacher, batch, masks))
    by_hand = 0.0
    real = batch["attention_mask"].bool().flatten()
    with torch.no_grad(), moiety.watch(student.model, keep="all") as a:
        student.represent(batch)
    with torch.no_grad(), moiety.watch(teacher.model, keep="all") as b:
        teacher.represent(batch)
    for layer in a.layers:
        p, q = a[layer][0].probs[real], b[layer][0].probs[real]
        by_hand += float(F.kl_div(p.log(), q, reduction="none").sum(-1).mean())
    assert by_hand > 1e-6
    assert float(told["routing"]) == pytest.approx(by_hand, rel=1e-4)
    own = objective.target(student.copy(), batch, masks)
    assert float(objective.backward(student, batch, masks, own)["routing"]) < 1e-7


def test_a_model_without_experts_has_no_routers_to_match():
    _, teacher, batch, masks = prepared("text")
    with pytest.raises(ValueError, match="has no MoE layer"):
        Objective(match_routing=1.0).target(teacher, batch, masks)


def test_capacity_that_a_batch_shares_couples_examples():
    assert coupling(encoder("text").model) is None
    mixture = upcycled("text")
    assert coupling(mixture.model) is None
    layer = next(m for m in mixture.model.modules() if isinstance(m, moiety.MoE))
    layer.capacity_factor = 1.0
    assert "shares the capacity" in coupling(mixture.model)
    layer.group = "example"
    assert coupling(mixture.model) is None
