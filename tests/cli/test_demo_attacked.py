"""The last step of the demo: the audit of a model that it trained, with its picture."""

import pytest
import torch
from torch.utils.data import TensorDataset

from moiety.cli import demo
from moiety.cli.demo import attacked, stream, tasks
from moiety.data import digits
from moiety.train import fit


@pytest.fixture(scope="module")
def trained():
    train, test = digits()
    (arm,) = [arm for arm in demo.ARMS if arm.name == attacked.ARM]
    model = demo.build(arm, 0)
    fit(model, train, epochs=4, batch=demo.BATCH, seed=0)
    return model, test


def test_attacks_hurt_and_the_page_has_the_picture(trained, monkeypatch):
    monkeypatch.setattr(attacked, "EXAMPLES", 16)
    model, test = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    part = attacked.run(model, test, 0)
    error = part.result["union"]["error"]
    assert error[0] < 0.2 < 0.4 < error[-1] and error == sorted(error)
    assert len(part.result["routing"]) == demo.DEPTH
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    page = demo.page([{"arm": "dense"}], {"dense": {}}, {}, "moiety demo", tasks.Found(), part)
    assert attacked.TITLE in page and page.count('<svg class="chart"') == 1
    assert attacked.sentence(part) in page
    again = attacked.run(model, test, 0)
    assert again.view() == part.view()  # no time is on the page: the same seed, the same page


def test_the_command_attacks_what_it_trained(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ARMS", [arm for arm in demo.ARMS if arm.name == attacked.ARM])
    monkeypatch.setattr(tasks, "GATES", [])
    monkeypatch.setattr(stream, "LEARNERS", [])
    monkeypatch.setattr(attacked, "EXAMPLES", 8)
    code, out, err = moiety("demo", "--epochs", 1, "--out", tmp_path)
    assert code == 0, err
    assert f"{attacked.TITLE}: " in out and "the attack: " in out
    assert attacked.TITLE in (tmp_path / "index.html").read_text()


def test_who_asks_for_a_router_gets_no_attack(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(attacked, "run", lambda *_: pytest.fail("it attacked"))
    code, out, _ = moiety("demo", "--epochs", 1, "--arm", attacked.ARM, "--out", tmp_path)
    assert code == 0 and "attack" not in out


def test_few_examples_are_enough():
    """A smaller set than the demo asks for is attacked as a whole."""
    x, y = torch.rand(3, 16, 4), torch.tensor([0, 1, 2])
    (arm,) = [arm for arm in demo.ARMS if arm.name == attacked.ARM]
    part = attacked.run(demo.build(arm, 0), TensorDataset(x, y), 0)
    assert part.result["data"]["examples"] == 3
