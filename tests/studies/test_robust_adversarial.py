"""`robust/adversarial-training`: models are tuned on attacks, from the model of the same seed."""

from test_robust_pgd import trial

from moiety.studies.robust import curves, zoo
from moiety.studies.robust.adversarial_training import TUNED, study

NAME = study.name


def test_an_arm_and_its_tuned_twin_differ_in_the_tuning_alone(tmp_path):
    for model, tuned in TUNED.items():
        plain, twin = (
            zoo.spec(trial(NAME, arm, tmp_path).settings, seed=3) for arm in (model, tuned)
        )
        assert {word for word in twin if twin[word] != plain.get(word)} == {
            "adversarial",
            "adversarial_batch",
            "adversarial_epochs",
            "adversarial_steps",
        }


def test_a_tuned_model_is_another_one_at_the_same_cost(tmp_path):
    plain, tuned = (curves.run(trial(NAME, arm, tmp_path)) for arm in ("ViT++", TUNED["ViT++"]))
    assert plain["cost"] == tuned["cost"]
    assert plain["mean error"] != tuned["mean error"]


def test_every_model_is_asked_what_tuning_costs_and_gains():
    pairs = {(claim.a, claim.b): claim.metric for claim in study.claims}
    for model, tuned in TUNED.items():
        assert pairs[model, tuned] == "clean error"
        assert pairs[tuned, model] == "error at 8/255"
