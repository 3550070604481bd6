"""A run of a study: what it leaves in its folder, and how it goes on after anything."""

import errno
import io as text_io
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from moiety import io
from moiety.lab.driver import command_line, run_study
from moiety.lab.ledger import ledger, result_path
from moiety.lab.loading import load_study
from moiety.lab.store import Store

TOY = Path(__file__).parent / "toy.py"


class Lab:
    """A copy of the toy study that a test may change, its folder, and what was printed."""

    def __init__(self, folder):
        self.file, self.out = folder / "toy.py", folder / "out"
        shutil.copy(TOY, self.file)
        self.printed = ""

    def run(self, **words):
        console = Console(file=text_io.StringIO(), width=200)
        words = {"scale": "smoke", "out": self.out, **words}
        try:
            return run_study(str(self.file), console=console, **words)
        finally:
            self.printed = console.file.getvalue()

    def change(self, old, new):
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))
        os.utime(self.file, ns=(len(new), self.file.stat().st_mtime_ns + 1))

    def bytes(self, folder):
        return {path.name: path.read_bytes() for path in (self.out / folder).glob("*")}

    @property
    def lines(self):
        return [line for line in self.printed.splitlines() if "seed" in line and "/" in line[:6]]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_a_run_leaves_all_that_is_promised(lab):
    result = lab.run()
    names = {path.name for path in lab.out.iterdir() if not path.name.endswith(".lock")}
    files = {"study.json", "plan.json", "looks.json", "result.json", "report.html"}
    assert names == {*files, "trials", "curves", "checkpoints"}
    assert io.read_json(lab.out / "result.json") == result
    assert result["failures"] == [] and result["seeds"] == 3
    assert [arm["finished"] for arm in result["arms"]] == [3, 3]
    assert result["claims"][0]["verdict"]["word"]
    about = io.read_json(lab.out / "study.json")
    assert about["name"] == "tests/toy" and about["reference"] == str(lab.file)
    assert about["command"] == result["command"]
    record = io.read_json(next((lab.out / "trials").glob("wide-s0-*.json")))
    assert record["settings"] == {
        "steps": 8, "width": 16, "stage": "main", "scale": "smoke", "device": "cpu",
    }  # fmt: skip
    assert len(lab.lines) == 6 and "1/6 narrow, seed 0: Error" in lab.printed


def test_running_again_does_nothing_and_is_the_same_look(lab):
    first = lab.run()
    trials = lab.bytes("trials")
    again = lab.run()
    assert lab.lines == [] and lab.bytes("trials") == trials
    assert again["looks"] == first["looks"] and len(first["looks"]) == 1


def test_more_seeds_run_only_the_new_trials_and_are_another_look(lab):
    lab.run(seeds=2)
    old = lab.bytes("trials")
    result = lab.run(seeds=4)
    assert len(lab.lines) == 4
    assert old.items() <= lab.bytes("trials").items()
    assert [look["seeds"] for look in result["looks"]] == [2, 4]
    assert result["planned"] == {"seeds": 4, "from": "given"}
    assert lab.run()["seeds"] == 4  # as stored
    with pytest.raises(ValueError, match="3 seeds are too few"):
        lab.run(seeds=3)


def test_changed_code_is_told_since_the_hash_of_a_trial_does_not_hold_it(lab):
    lab.run()
    lab.file.write_text(f"# another remark\n{lab.file.read_text()}")
    lab.run()
    assert "has changed since the trials" in lab.printed and lab.lines == []
    lab.run()
    assert "has changed" not in lab.printed


def test_changed_settings_make_new_trials_and_never_mix(lab):
    first = lab.run()
    lab.change('"wide": {"width": 16}', '"wide": {"width": 32}')
    second = lab.run()
    assert len(lab.lines) == 3  # of the arm that changed
    assert len(lab.bytes("trials")) == 9
    narrow, wide = (result["arms"] for result in (first, second))
    assert narrow[0]["metrics"] == wide[0]["metrics"]
    assert [arm["finished"] for arm in second["arms"]] == [3, 3]
    assert second["arms"][1]["settings"]["width"] == 32
    assert second["trials_sha256"] != first["trials_sha256"]
    lab.change('"wide": {"width": 32}', '"wide": {"width": 16}')
    assert lab.run()["trials_sha256"] == first["trials_sha256"]
    assert lab.lines == []


def test_a_failed_trial_is_told_and_tried_again(lab):
    broken = 'if (running.arm, running.seed) == ("wide", 1): raise OSError("no disk")\n    '
    lab.change("    settings, steps = running", f"    {broken}settings, steps = running")
    result = lab.run()
    assert result["failures"] == [{"arm": "wide", "seed": 1, "error": "OSError: no disk"}]
    assert "wide, seed 1: failed: OSError: no disk" in lab.printed
    assert f"1 trials failed (of wide); their tracebacks are in {lab.out / 'trials'}" in lab.printed
    (record,) = Store(lab.out).failed().values()
    assert "Traceback (most recent call last)" in record["extra"]["traceback"]
    lab.change(broken, "")
    assert lab.run()["failures"] == []
    assert len(lab.lines) == 1


def test_an_interrupt_leaves_all_in_order_and_says_how_to_go_on(lab):
    stop = 'if running.arm == "wide" and running.seed == 1: raise KeyboardInterrupt\n    '
    lab.change("    settings, steps = running", f"    {stop}settings, steps = running")
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert "Stopped; 3 trials are done and kept. To continue: moiety study run" in lab.printed
    assert not (lab.out / "result.json").exists()
    lab.change(stop, "")
    lab.run()
    assert len(lab.lines) == 3


def test_a_full_disk_is_said_with_the_command_that_goes_on(lab, monkeypatch):
    write = Store.finish

    def finish(store, trial, *given, **words):
        if trial.seed == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(store, trial, *given, **words)

    with monkeypatch.context() as full:
        full.setattr(Store, "finish", finish)
        with pytest.raises(OSError, match="is full; what is done is kept"):
            lab.run()
    assert lab.run()["failures"] == [] and len(lab.lines) == 4


def test_a_file_is_no_folder(lab):
    with pytest.raises(ValueError, match="is a file; give a folder"):
        lab.run(out=lab.file)


def test_bars_in_a_terminal(lab):
    screen = text_io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    run_study(str(lab.file), scale="smoke", out=lab.out, seeds=2, console=console)
    assert "trials" in screen.getvalue() and "4/4" in screen.getvalue()
    assert "seed 0: Error" not in screen.getvalue()  # lines are for files


def test_a_folder_in_use_says_by_whom_or_is_waited_for(lab):
    with io.lease(lab.out):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on host"):
            lab.run()
        assert not (lab.out / "trials").exists()
    held, free = threading.Event(), threading.Event()

    def hold():
        with io.lease(lab.out):
            held.set()
            free.wait(0.3)

    threading.Thread(target=hold).start()
    held.wait()
    assert lab.run(wait=30)["seeds"] == 3


def test_a_folder_of_another_run_is_refused(lab):
    lab.run(seeds=2)
    with pytest.raises(ValueError, match="holds a run of scale smoke, not small"):
        lab.run(scale="small")
    lab.change('name="tests/toy"', 'name="tests/other"')
    with pytest.raises(ValueError, match="holds a run of name tests/toy, not tests/other"):
        lab.run()


def test_some_arms_first_and_the_verdicts_when_all_have_run(lab):
    first = lab.run(arms=["wide"])
    assert "1 claims of the study are on arms that were not run" in lab.printed
    assert [arm["name"] for arm in first["arms"]] == ["wide"] and first["claims"] == []
    lab.run(arms=["wide"], seeds=4)
    waiting = lab.run(arms=["narrow"], seeds=5)
    assert "Verdicts wait for the other arms" in lab.printed and "arms" not in waiting
    result = lab.run()
    assert [arm["finished"] for arm in result["arms"]] == [5, 5] and len(result["claims"]) == 1
    assert "arms that were not run" not in lab.printed
    with pytest.raises(ValueError, match="has no arm 'deep'; it has narrow, wide"):
        lab.run(arms=["deep"])


def test_a_budget_is_fixed_once(lab):
    lab.run(seeds=2, budget="2s")
    plan = io.read_json(lab.out / "plan.json")["budget"]
    assert plan["seconds"] == 2 and plan["equal"] == "flops"
    records = Store(lab.out).finished().values()
    assert {(r["arm"], r["settings"]["examples"]) for r in records} == {
        (arm, speed["examples"]) for arm, speed in plan["arms"].items()
    }
    lab.change("Speed(seconds=2e-3", "Speed(seconds=9e-3")  # a busier machine
    result = lab.run(seeds=3)
    assert len(lab.lines) == 2
    assert result["budget"] == plan == io.read_json(lab.out / "plan.json")["budget"]
    with pytest.raises(ValueError, match=r"calibrated with seconds 2(\.0)?, not 60"):
        lab.run(budget="1m")


def test_a_pilot_fixes_the_seeds_and_is_not_counted(lab):
    lab.change("margin=0.2", "margin=5.0")
    result = lab.run(pilot=3)
    assert "The pilot asks for" in lab.printed
    plan = io.read_json(lab.out / "plan.json")
    assert plan["from"] == "pilot" and plan["seeds"] == result["seeds"] >= 5
    assert len(Store(lab.out).finished()) == 6 + 2 * plan["seeds"]
    assert all(
        set(arm["metrics"]["error"]["values"]) <= set("0123456789") for arm in result["arms"]
    )
    assert "--pilot 3" in result["command"]
    lab.run(pilot=3)  # the same command again
    assert lab.lines == []


def test_most_limits_what_a_pilot_asks_for(lab):
    lab.change("margin=0.2", "margin=0.001")
    result = lab.run(pilot=3, most=6)
    assert "The pilot asks for" in lab.printed and "; --most makes it 6." in lab.printed
    assert result["seeds"] == 6 and result["planned"]["pilot"] == 3
    assert "--pilot 3 --most 6" in result["command"]
    with pytest.raises(ValueError, match="--most goes with --pilot"):
        lab.run(most=6)


def test_a_data_set_that_is_not_here_ends_a_run_at_once(lab):
    lab.change("import time\n", "import time\nfrom moiety.data.named import MissingData\n")
    lab.change(
        "        return {",
        "        raise MissingData('films are not here; fetch them')\n        return {",
    )
    with pytest.raises(ValueError, match=r"^films are not here; fetch them$"):
        lab.run(seeds=2)
    assert not Store(lab.out).failed()  # nothing to forget once they are here


def test_without_plotly_the_run_ends_and_says_what_to_install(lab, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert lab.run(seeds=2)["seeds"] == 2
    assert (lab.out / "report.html").exists()
    assert "It is written without plots, because plotly is missing" in lab.printed
    assert "pip install 'moiety[lab]'" in lab.printed and f"moiety report {lab.out}" in lab.printed


def test_a_page_that_fails_does_not_take_the_result_with_it(lab, monkeypatch):
    monkeypatch.setattr("moiety.lab.driver.study_page", lambda *_: {}["arms"])
    result = lab.run(seeds=2)
    assert io.read_json(lab.out / "result.json") == result
    said = f"its page failed (KeyError: 'arms'); to make it: moiety report {lab.out}"
    assert said in lab.printed and "The page:" not in lab.printed


# -- blocks and search -----------------------------------------------------------------------------

BLOCKS = """
def blocks(runs):
    return [{"error": train(run)["error"] + 100 * len(runs)} for run in runs]

"""


def test_a_block_runs_whole_and_more_seeds_change_no_bit(lab):
    lab.change("study = Study(", f"{BLOCKS}study = Study(")
    lab.change("    run=train,", "    run_block=blocks, block=2,")
    values = lab.run(seeds=3)["arms"][0]["metrics"]["error"]["values"]
    assert list(values) == ["0", "1", "2"] and min(values.values()) > 200
    assert len(lab.lines) == 6 and len(Store(lab.out).finished()) == 6
    assert not list((lab.out / "checkpoints").glob("*"))
    more = lab.run(seeds=4)["arms"][0]["metrics"]["error"]["values"]
    assert len(lab.lines) == 2
    assert values.items() <= more.items() and min(more.values()) > 200


SEARCH = """from moiety.lab.tuning import Choice, Search
SEARCH = Search(space={"rate": Choice([0.01, 0.02, 0.03])}, trials=3, metric="validation")
"""


@pytest.fixture
def searching(lab):
    lab.change("import torch\n", f"{SEARCH}import torch\n")
    lab.change("lr=0.01", 'lr=settings["rate"]')
    lab.change("    speed=lambda", "    search=SEARCH,\n    speed=lambda")
    metric = '"validation": Metric("V", better="lower", split="validation")'
    lab.change('better="lower")}', f'better="lower"), {metric}}}')
    lab.change("        return {", "        return {'validation': 1 / settings['rate'], ")
    return lab


def test_a_search_comes_first_and_sees_validation_only(searching):
    result = searching.run(seeds=2)
    records = Store(searching.out).finished().values()
    tuned = [r for r in records if r["settings"]["stage"] == "tune"]
    assert len(tuned) == 6 and all(set(r["metrics"]) == {"validation"} for r in tuned)
    assert "Error" not in "".join(searching.lines[:6])
    main = [r for r in records if r["settings"]["stage"] == "main"]
    assert len(main) == 4 and all(set(r["metrics"]) == {"error", "validation"} for r in main)
    for arm, found in result["tuning"]["arms"].items():
        assert {r["settings"]["rate"] for r in main if r["arm"] == arm} == {found["chosen"]["rate"]}
    searching.run(seeds=3)
    assert len(searching.lines) == 2  # nothing is searched again


def test_an_arm_without_settings_left_does_not_stop_the_others(searching):
    rule = 'rule=lambda record: "wide" if record["arm"] == "wide" else None'
    searching.change('metric="validation")', f'metric="validation", {rule})')
    result = searching.run(seeds=2)
    assert [(arm["name"], arm["finished"]) for arm in result["arms"]] == [
        ("narrow", 2), ("wide", 0),
    ]  # fmt: skip
    why = "o setting of wide is left of 3 (3 × wide): search a wider space, or more trials."
    assert result["tuning"]["arms"]["wide"]["failure"] == f"n{why}"
    assert f"wide is not measured: n{why}" in searching.printed
    assert "The page:" in searching.printed
    (claim,) = result["claims"]
    assert claim["verdict"]["word"] == "undecided" and claim["would_change"] == f"N{why}"
    (row,) = ledger_of(searching, result)
    assert row.word == "undecided" and row.would_change == f"N{why}"


def ledger_of(lab, result):
    """The ledger of the study alone."""
    study = load_study(str(lab.file))
    io.write_json(result_path(lab.out, study.name), result)
    return ledger(lab.out, {study.name: study})


def test_a_search_that_leaves_no_arm_is_one_sentence(searching):
    searching.change('metric="validation")', 'metric="validation", rule=lambda record: "no")')
    with pytest.raises(ValueError, match=r"no setting of narrow is left .* no setting of wide"):
        searching.run(seeds=2)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_what_is_not_by_default():
    asked = {"seeds": None, "device": "cpu", "workers": 1, "budget": 90.0, "arm": ["a b", "c"]}
    line = command_line("x.py", "small", Path("my runs"), asked)
    assert line == (
        "moiety study run x.py --scale small --out 'my runs' --budget 90s --arm 'a b' --arm c"
    )
    line = command_line("x", "full", Path("o"), {"workers": 2, "device": "cuda", "seeds": 0})
    assert line.endswith("--workers 2 --device cuda --seeds 0")


def test_the_study_of_the_docs_runs(lab):
    text = (Path(__file__).parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
    lab.file.write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    result = lab.run()
    assert result["failures"] == [] and result["study"] == "mine/width"
    assert len(result["claims"]) == 1 and set(result["curves"]["loss"]) == {"narrow", "wide"}
