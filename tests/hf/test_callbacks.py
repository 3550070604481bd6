"""`RoutingHealth` inside a real `Trainer`: windows, logs, resuming, evaluation, and the page."""

import gc
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

import moiety
from moiety.hf.callbacks import RoutingHealth
from moiety.watch import moe_layers
from planted import planted

LENGTH, LAYERS = 6, ["model.layers.0.mlp", "model.layers.1.mlp"]


def tiny(dead=None):
    """A language model of two layers with four experts each, one of which may get no token."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = moiety.MoE("sigmoid-balanced", dim=16, hidden=8, experts=4, k=1)
    if dead is not None:  # the bias decides who is chosen, and its rate is how fast it moves
        router = model.model.layers[1].mlp.router
        router.bias.data[dead] = -1e6
    return model


def data(n=48):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (n, LENGTH), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(tmp_path, callback, model=None, callbacks=(), **words):
    given = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    arguments = TrainingArguments(**(given | words))
    return Trainer(
        model=model or tiny(),
        args=arguments,
        train_dataset=data(),
        eval_dataset=data(8),
        callbacks=[*callbacks, callback],
    )


def windows(tmp_path):
    text = (tmp_path / "routing_health.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_window_holds_the_tokens_of_its_steps(tmp_path):
    trainer(tmp_path, RoutingHealth(every=3)).train()
    rows = windows(tmp_path)
    assert [(row["step"], row["steps"]) for row in rows] == [(3, 3), (6, 3), (8, 2)]
    for row in rows:
        assert list(row["layers"]) == LAYERS
        for layer in row["layers"].values():
            assert layer["tokens"] == row["steps"] * 4 * LENGTH
            assert sum(layer["load"]) == pytest.approx(1)
            assert 1 <= layer["effective"] <= 4


def test_accumulated_batches_count_and_evaluation_does_not(tmp_path):
    words = {"gradient_accumulation_steps": 3, "max_steps": 4, "eval_strategy": "steps"}
    trainer(tmp_path, RoutingHealth(every=2), eval_steps=1, **words).train()
    tokens = [row["layers"][LAYERS[0]]["tokens"] for row in windows(tmp_path)]
    assert tokens == [2 * 3 * 4 * LENGTH] * 2


def test_gradient_checkpointing_counts_once(tmp_path):
    words = {"gradient_checkpointing": True}
    words["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    trainer(tmp_path, RoutingHealth(every=4), **words).train()
    assert [row["layers"][LAYERS[0]]["tokens"] for row in windows(tmp_path)] == [96, 96]


class Tracker(TrainerCallback):
    """Keeps what it is logged, as TensorBoard's callback writes it."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_the_logs_of_trackers_that_came_before_hold_the_numbers(tmp_path):
    tracker = Tracker()
    trained = trainer(tmp_path, RoutingHealth(every=4), callbacks=[tracker])
    trained.train()
    told = [logs for logs in tracker.seen if "routing/dead" in logs]
    assert len(told) == 2
    rows = windows(tmp_path)
    for logs, row in zip(told, rows):
        for name in LAYERS:
            assert logs[f"routing/{name}/effective"] == row["layers"][name]["effective"]
        assert logs["routing/drop_rate"] == 0
    history = [logs for logs in trained.state.log_history if "routing/dead" in logs]
    assert [logs["step"] for logs in history] == [4, 8]


def test_training_is_not_changed_by_being_watched(tmp_path):
    losses = []
    for callback in (RoutingHealth(every=2), Tracker()):
        torch.manual_seed(0)
        run = trainer(tmp_path, callback)
        run.train()
        losses.append([logs["loss"] for logs in run.state.log_history if "loss" in logs])
    assert losses[0] == losses[1]


def test_a_resumed_run_continues_without_doubled_steps(tmp_path):
    words = {"save_strategy": "steps", "save_steps": 4, "save_safetensors": True}
    words.pop("save_safetensors")
    trainer(tmp_path, RoutingHealth(every=2), **words).train()
    before = windows(tmp_path)
    with open(tmp_path / "routing_health.jsonl", "a") as file:
        file.write('{"step": 10, "lay')  # killed while it wrote
    run = trainer(tmp_path, RoutingHealth(every=2), max_steps=10, **{**words, "save_steps": 100})
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    after = windows(tmp_path)
    assert [row["step"] for row in before] == [2, 4, 6, 8]
    assert [row["step"] for row in after] == [2, 4, 6, 8, 10]
    assert after[:2] == before[:2]


def test_a_new_run_in_the_same_folder_starts_a_new_file(tmp_path):
    for _ in range(2):
        trainer(tmp_path, RoutingHealth(every=4)).train()
    assert [row["step"] for row in windows(tmp_path)] == [4, 8]


def test_a_dead_expert_is_warned_of_once_and_named_on_the_page(tmp_path):
    run = trainer(tmp_path, RoutingHealth(every=2, dead_after=2), tiny(dead=3))
    with pytest.warns(UserWarning, match="expert 3 got no token") as caught:
        run.train()
    said = [str(w.message) for w in caught if "got no token" in str(w.message)]
    mine = [text for text in said if "layers.1.mlp: expert 3" in text]
    assert mine == [
        "step 4, layer model.layers.1.mlp: expert 3 got no token for 2 windows of 2 steps in a row"
    ]
    html = (tmp_path / "routing_health.html").read_text()
    assert "model.layers.1.mlp: expert 3 has had no token since step 1." in html


def test_the_page_shows_the_course_of_every_layer(tmp_path):
    trainer(tmp_path, RoutingHealth(every=2)).train()
    html = (tmp_path / "routing_health.html").read_text()
    lines = re.findall(r'<polyline points="([^"]+)"', html)
    assert len(lines) == 2 * len(LAYERS)
    assert {len(line.split()) for line in lines} == {4}
    assert all(name in html for name in LAYERS)
    assert not re.search(r"https?://|<script|<img", html)


def test_out_says_where(tmp_path):
    trainer(tmp_path / "run", RoutingHealth(every=4, out=tmp_path / "health")).train()
    assert sorted(p.name for p in (tmp_path / "health").iterdir()) == [
        "routing_health.html",
        "routing_health.jsonl",
    ]
    assert not (tmp_path / "run" / "routing_health.jsonl").exists()


def test_the_watch_is_left_at_the_end(tmp_path):
    model = tiny()
    trainer(tmp_path, RoutingHealth(), model).train()
    assert all(not layer._watchers for layer in moe_layers(model).values())


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError("out of luck")


def test_training_that_raises_leaves_no_watch_behind(tmp_path):
    model, health = tiny(), RoutingHealth(every=1)
    run = trainer(tmp_path, health, model, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="out of luck"):
        run.train()
    run.callback_handler.callbacks.clear()
    del run, health
    gc.collect()
    assert all(not layer._watchers for layer in moe_layers(model).values())
    assert [row["step"] for row in windows(tmp_path)] == [1, 2, 3]


def test_a_process_that_ends_after_training_raised_is_silent(tmp_path):
    # Native layers: to leave their watch is to tell the compiler, which is gone at the very end.
    script = (
        "import sys; from pathlib import Path; from test_callbacks import *\n"
        "health = RoutingHealth(every=9)\n"
        "run = trainer(Path(sys.argv[1]), health, planted('olmoe'), callbacks=[Fails()])\n"
        "with pytest.raises(RuntimeError): run.train()"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_folder_that_cannot_be_written_to_is_known_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model, health = tiny(), RoutingHealth(out=tmp_path / "file")
    run = trainer(tmp_path, health, model)
    with pytest.raises(OSError, match="file"):
        run.train()
    assert run.state.global_step == 0
    assert all(not layer._watchers for layer in moe_layers(model).values())
    run.evaluate()


def test_a_second_train_of_the_same_callback_begins_anew(tmp_path):
    model, health = tiny(), RoutingHealth(every=4)
    for _ in range(2):
        trainer(tmp_path, health, model).train()
    assert [row["layers"][LAYERS[0]]["tokens"] for row in windows(tmp_path)] == [96, 96]


def test_only_the_first_process_watches_and_says_whose_load_it_is(tmp_path):
    control = TrainerControl()
    for first, told in ((False, False), (True, True)):
        model, health = tiny(), RoutingHealth(every=1, out=tmp_path / str(first))
        state = SimpleNamespace(is_world_process_zero=first, global_step=0, log_history=[])
        args = SimpleNamespace(output_dir=str(tmp_path), world_size=2)
        health.on_train_begin(args, state, control, model=model)
        health.on_step_begin(args, state, control)
        model(torch.zeros(1, 4, dtype=torch.long))
        state.global_step = 1
        health.on_step_end(args, state, control)
        health.on_log(args, state, control, logs={})
        health.on_train_end(args, state, control)
        assert (tmp_path / str(first)).exists() is told
    assert "first of 2 processes only" in (tmp_path / "True/routing_health.html").read_text()


def test_memory_is_bounded_by_the_window(tmp_path):
    seen = []

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(len(health._routes.records))

    health = RoutingHealth(every=2)
    trainer(tmp_path, health, callbacks=[Spy()]).train()
    assert max(seen) <= 2 * len(LAYERS)


def test_balance_losses_are_left_to_those_who_collect_them(tmp_path):
    model = tiny()
    for layer in model.model.layers:
        layer.mlp = moiety.MoE("switch", dim=16, hidden=8, experts=4, balance={"switch": 0.01})
    run = trainer(tmp_path, RoutingHealth(every=2), model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
        del run
        gc.collect()
    said = [str(w.message) for w in caught if "balance losses" in str(w.message)]
    # The layers themselves say that nobody collects; the watch of a health callback never does.
    assert not [text for text in said if "recorded but never collected" in text]
    assert len(said) == len(LAYERS)


@pytest.mark.filterwarnings("ignore:balance losses")
def test_no_graph_is_kept_when_a_model_is_used_after_training_raised(tmp_path):
    model = tiny()
    for layer in model.model.layers:
        layer.mlp = moiety.MoE("switch", dim=16, hidden=8, experts=4, balance={"switch": 0.01})
    health = RoutingHealth(every=9)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path, health, model, callbacks=[Fails()]).train()
    model(torch.zeros(1, 4, dtype=torch.long))
    held = (vars(record) for _, record in health._routes.records)
    assert not any(t.requires_grad for r in held for t in r.values() if t is not None)
    assert health._routes.terms() == {}


@pytest.mark.parametrize("words", [{"every": 0}, {"every": 1.5}, {"dead_after": 0}])
def test_wrong_numbers_are_refused(words):
    with pytest.raises(ValueError, match="must be a whole number from 1 on"):
        RoutingHealth(**words)


def test_a_dense_model_is_refused_at_the_start(tmp_path):
    dense = LlamaForCausalLM(tiny().config)
    with pytest.raises(ValueError, match="has no MoE layer"):
        trainer(tmp_path, RoutingHealth(), dense).train()


def test_models_of_transformers_are_watched_too(tmp_path):
    run = trainer(tmp_path, RoutingHealth(every=2), planted("olmoe", dead=5).train())
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp: expert 5 got no token for 3 windows"):
        run.train()
    rows = windows(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert all(5 in row["layers"]["model.layers.1.mlp"]["dead"] for row in rows)
    assert rows[0]["layers"]["model.layers.0.mlp"]["tokens"] == 2 * 4 * LENGTH


def test_it_is_a_name_of_the_package():
    assert moiety.RoutingHealth is RoutingHealth
