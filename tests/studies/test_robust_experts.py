"""`robust/experts`: what an arm's number of experts does to its model."""

import pytest
from test_robust_pgd import trial

from moiety.moe import MoE
from moiety.studies.robust import curves, zoo
from moiety.studies.robust.experts import study


@pytest.mark.parametrize("arm", study.arms)
def test_a_model_has_the_experts_of_its_arm(arm, tmp_path):
    one = trial(study.name, arm, tmp_path)
    experts, model = one.settings["experts"], zoo.trained(one).model
    layers = [part for part in model.modules() if isinstance(part, MoE)]
    assert arm.split()[0] == str(experts)
    assert [layer.router.experts for layer in layers] == [experts]
    assert [layer.router.k for layer in layers] == [min(2, experts)]


def test_one_expert_costs_what_a_dense_layer_does_and_others_that_of_two(tmp_path):
    one, two, many = (
        curves.run(trial(study.name, arm, tmp_path))["cost"]
        for arm in ("1 expert", "2 experts", "32 experts")
    )
    assert one == pytest.approx(1, rel=0.01)
    assert two == pytest.approx(1.33, abs=0.1)  # every second block has two thirds of it twice
    assert one < many < two * 1.05  # a capacity may drop some, a larger router costs a little
