"""The function that upcycling keeps is still there after saving, and in a Trainer's checkpoint."""

import pytest
import torch
import transformers as T
import zoo
from measuring import KEPT, STARTS, another_batch, measured
from safetensors.torch import load_file

import moiety
from moiety.hf.probe import make_probe

pytestmark = pytest.mark.filterwarnings("ignore:balance losses")  # no loss of a model is asked for
CASES = [
    pytest.param(name, start, id=f"{name}-{start}")
    for name in zoo.THIRTEEN
    for start in STARTS
    if start != "expert-choice" or name not in zoo.DECODERS
]
each = pytest.mark.parametrize(("name", "start"), CASES)


def upcycled(name, start):
    model = zoo.make(name)
    return model, moiety.upcycle(model, experts=4, **STARTS[start])


class Still(T.Trainer):
    """Takes steps at a learning rate of zero, on whatever a model answers."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        answer = model(**inputs)
        first = answer if torch.is_tensor(answer) else next(iter(answer.values()))
        return first.float().square().mean()


def rows(model):
    """The examples of a probe, one by one, by the names that the model's forward has."""
    probe = make_probe(model)
    batch = {"src": probe.args[0]} if probe.args else dict(probe.kwargs)
    return [{word: value[i] for word, value in batch.items()} for i in range(2)]


@each
def test_saved_and_loaded(name, start, tmp_path):
    model, moe = upcycled(name, start)
    moiety.save(moe, tmp_path)
    again = moiety.load(tmp_path, into=None if hasattr(model, "config") else zoo.make(name))
    assert measured(model, again, another_batch(model)) <= KEPT


@each
def test_in_a_checkpoint_of_the_trainer(name, start, tmp_path):
    model, moe = upcycled(name, start)
    words = {"per_device_train_batch_size": 2, "max_steps": 1, "save_steps": 1, "use_cpu": True}
    words |= {"learning_rate": 0.0, "report_to": "none", "disable_tqdm": True}
    arguments = T.TrainingArguments(str(tmp_path), remove_unused_columns=False, **words)
    Still(moe, arguments, train_dataset=rows(model)).train()
    folder = tmp_path / "checkpoint-1"
    if hasattr(model, "config"):
        again = moiety.load(folder)
    else:  # the Trainer saves the weights of a plain module, and nothing about it
        again = upcycled(name, start)[1]
        for p in again.parameters():
            p.data.zero_()
        again.load_state_dict(load_file(folder / "model.safetensors"))
    assert measured(model, again.eval(), another_batch(model)) <= KEPT
