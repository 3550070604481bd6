"""`moiety demo`: the whole command on two arms, and what it says when something is wrong."""

import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from moiety.cli import demo
from moiety.data import digits
from moiety.report import Column

TWO = ["--epochs", "1", "--arm", "dense", "--arm", "top-k"]


def test_two_arms_end_in_a_table_and_a_page(moiety, tmp_path):
    code, out, _ = moiety("demo", *TWO, "--out", tmp_path)
    assert code == 0
    assert re.search(r"dense +\d+\.\d% +2\.22 +1\.00", out)
    assert re.search(r"top-k +\d+\.\d% +2\.26 +1\.02", out)
    assert "One seed" in out
    assert str(tmp_path / "index.html") in out.replace("\n", "")
    html = (tmp_path / "index.html").read_text()
    assert "One seed" in html
    assert len(re.findall(r'<td class="shade-', html)) == demo.DEPTH * demo.EXPERTS
    assert all(f"block {i}" in html for i in (1, 2, 3))
    assert "moiety demo --seed 0 --epochs 1 --device cpu --arm dense --arm top-k" in html


def test_the_same_seed_gives_the_same_page(moiety, tmp_path):
    pages = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        moiety("demo", *TWO, "--seed", seed, "--out", tmp_path / folder)
        pages.append((tmp_path / folder / "index.html").read_text())
    assert pages[0] == pages[1] != pages[2]


def test_a_dry_run_shows_the_cost_and_writes_nothing(moiety, tmp_path):
    code, out, _ = moiety("demo", "--dry-run", "--out", tmp_path / "new")
    assert code == 0
    assert all(arm.name in out for arm in demo.ARMS)
    assert "Accuracy" not in out
    assert not (tmp_path / "new").exists()


def test_every_arm_costs_what_the_dense_one_does():
    _, test = digits()
    assert len(demo.ARMS) >= 7
    rows = [demo.measure_cost(arm, demo.build(arm, 0), test) for arm in demo.ARMS]
    for row in demo.beside_dense(rows, test):
        # Switch drops what exceeds its capacity: before training that is more than a little.
        assert (0.8 if row["arm"] == "switch" else 0.99) < row["relative"] < 1.04, row


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "nonsense"], "no device 'nonsense'"),
        (["--device", "cuda:99"], "no device 'cuda:99'"),
        (["--arm", "topk"], "no arm 'topk'; it has dense, softmax"),
        (["--epochs", "0"], "--epochs"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_a_wrong_argument_is_one_sentence(moiety, arguments, said):
    code, out, err = moiety("demo", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_an_unwritable_folder_is_told_before_the_training(moiety, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("it trained"))
    (tmp_path / "file").write_text("in the way")
    code, _, err = moiety("demo", "--out", tmp_path / "file" / "page")
    assert code == 2
    assert "cannot be written to: Not a directory" in err


def test_an_interrupt_is_one_line(moiety, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "fit", interrupted)
    code, _, err = moiety("demo", *TWO, "--out", tmp_path)
    assert (code, err.strip()) == (130, "moiety: interrupted.")
    assert list(tmp_path.iterdir()) == []


def test_threads_are_given_back():
    threads = torch.get_num_threads()
    with demo.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_the_command_runs_as_a_program():
    code = "from moiety.cli import main; main(['demo', '--help'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--dry-run" in run.stdout


def test_a_number_is_never_broken_nor_cut(capsys):
    cells = ["97.0%", "92.3…101.8", "−13.10…+15.34", "undecided", "2.23M"]
    heads = ["Accuracy", "95 % interval", "minus dense (points)", "Better?", "Active FLOPs"]
    row = {"arm": "perturbed-cosine", **dict(zip(heads, cells, strict=True))}
    columns = [Column("arm", "Arm"), *(Column(head, head) for head in heads)]
    demo.show(Console(width=80), [row], columns, "Title")
    out = capsys.readouterr().out
    assert [cell for cell in cells if cell not in out] == []
