"""Upcycled models in the real Trainer: accumulation, two ranks, other losses, whole runs."""

import os
import warnings
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from moiety import watch
from moiety.hf.upcycle import upcycle
from ranks import of_two

SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "pad_token_id": 0,
}
LENGTHS = (6, 2, 4, 3, 6, 5, 3, 2)  # of eight examples, two a call: calls differ in their labels


def model_of(kind, weight=0.5):
    torch.manual_seed(0)
    if kind == "bert":
        config = BertConfig(**SIZE, num_labels=3, hidden_dropout_prob=0.0,
                            attention_probs_dropout_prob=0.0)  # fmt: skip
        model = BertForSequenceClassification(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZE, num_key_value_heads=1))
    return upcycle(model, experts=4, k=2, balance={"switch": weight}).train()


def examples(kind, lengths=LENGTHS):
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 32, (n,), generator=draw).tolist() for n in lengths]
    if kind == "bert":
        return [{"input_ids": r, "labels": i % 3} for i, r in enumerate(rows)]
    return [{"input_ids": r, "labels": r} for r in rows]


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)

    def pad(values, filler):
        return torch.tensor([v + [filler] * (width - len(v)) for v in values])

    ids = [r["input_ids"] for r in rows]
    labels = [r["labels"] for r in rows]
    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad([[1] * len(i) for i in ids], 0),
        "labels": torch.tensor(labels) if isinstance(labels[0], int) else pad(labels, -100),
    }


class Gradients(TrainerCallback):
    """What the optimizer's first step is given."""

    def __init__(self):
        self.found = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.found is None:
            model = getattr(model, "module", model)
            self.found = gradients(model)


class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def arguments(folder, **words):
    words = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0,
             "lr_scheduler_type": "constant", "save_strategy": "no", **words}  # fmt: skip
    return TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        **words,
    )  # fmt: skip


def step(model, data, folder, batch, calls, trainer_words=None, **words):
    """The gradients of one optimizer step of the Trainer."""
    seen = Gradients()
    args = arguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=calls, **words
    )
    trainer = InOrder(
        model, args, train_dataset=data, data_collator=collate, callbacks=[seen],
        **(trainer_words or {}),
    )  # fmt: skip
    trainer.train()
    return seen.found


def by_hand(model, batches, weights):
    """The gradient of Σ weight · outputs.loss, each call alone."""
    model.zero_grad()
    for batch, weight in zip(batches, weights, strict=True):
        (weight * model(**batch).loss).backward()
    return gradients(model)


def pairs(data):
    return [collate(data[i : i + 2]) for i in range(0, len(data), 2)]


def predicted(batch):
    return int(batch["labels"][:, 1:].ne(-100).sum())


def same(got, want, atol=1e-6):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=atol, rtol=1e-4, msg=name)


# -- accumulation ----------------------------------------------------------------------------------


def test_one_call_or_four_take_the_same_step(tmp_path):
    """Four equal calls: their balance losses are that of all rows at once."""
    data = examples("llama", (6, 3)) * 4
    one, four = model_of("llama"), model_of("llama")
    same(step(one, data, tmp_path, 8, 1), step(four, data, tmp_path, 2, 4))
    same(dict(one.named_parameters()), dict(four.named_parameters()), atol=1e-5)


def test_calls_with_few_labels_count_less_for_task_and_balance_alike(tmp_path):
    data = examples("llama")
    got = step(model_of("llama"), data, tmp_path, 2, 4)
    counts = [predicted(b) for b in pairs(data)]
    assert len(set(counts)) > 2
    same(got, by_hand(model_of("llama"), pairs(data), [n / sum(counts) for n in counts]))


def test_balance_stays_beside_a_task_loss_that_ignores_the_count(tmp_path):
    """BERT takes `num_items_in_batch` and returns the mean of each call all the same."""
    data = examples("bert")
    plain = step(model_of("bert", 0.0), data, tmp_path, 2, 4)["classifier.bias"]
    mean = by_hand(model_of("bert", 0.0), pairs(data), [1 / 4] * 4)["classifier.bias"]
    factor = float(plain.norm() / mean.norm())  # 1 if the Trainer took the mean of the calls
    got = step(model_of("bert"), data, tmp_path, 2, 4)
    same(got, by_hand(model_of("bert"), pairs(data), [factor / 4] * 4))


def test_bert_in_one_call(tmp_path):
    data = examples("bert")
    got = step(model_of("bert"), data, tmp_path, 8, 1)
    same(got, by_hand(model_of("bert"), [collate(data)], [1.0]))


def test_checkpointing_and_accumulation_together(tmp_path):
    data = examples("llama")
    got = step(model_of("llama"), data, tmp_path, 2, 4, gradient_checkpointing=True)
    same(got, step(model_of("llama"), data, tmp_path, 2, 4))


# -- two ranks -------------------------------------------------------------------------------------


def ranks_step(kind, folder, across):
    return step(model_of(kind), examples(kind), folder, 2, 2, average_tokens_across_devices=across)


def plain_ddp(kind, rank):
    model = DistributedDataParallel(model_of(kind))
    model(**pairs(examples(kind))[rank]).loss.backward()
    return gradients(model.module)


def work(folder, rank, results):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # fmt: skip
    found = {("ddp", kind): plain_ddp(kind, rank) for kind in ("bert", "llama")}
    for across in (True, False):
        found["trainer", across] = ranks_step("llama", folder, across)
    if rank == 0:
        results.update(found)


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    """Gradients of every case, from one pair of processes."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return of_two(partial(work, folder), folder)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_ranks_average_their_gradients(reduced, kind):
    want = by_hand(model_of(kind), pairs(examples(kind))[:2], [1 / 2] * 2)
    same(reduced["ddp", kind], want)


def test_tokens_averaged_across_ranks_weigh_calls_by_their_labels(reduced):
    batches = pairs(examples("llama"))
    counts = [predicted(b) for b in batches]
    want = by_hand(model_of("llama"), batches, [n / sum(counts) for n in counts])
    same(reduced["trainer", True], want)


def test_or_each_rank_by_its_own(reduced):
    """Batches go to the ranks in turn."""
    batches = pairs(examples("llama"))
    n = [predicted(b) for b in batches]
    own = (n[0] + n[2], n[1] + n[3])
    want = by_hand(model_of("llama"), batches, [n[i] / own[i % 2] / 2 for i in range(4)])
    same(reduced["trainer", False], want)


# -- losses made outside the model -----------------------------------------------------------------


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def test_a_loss_made_outside_the_model_is_told_once(tmp_path):
    outside = [({}, {"label_smoothing_factor": 0.1}), ({"compute_loss_func": own_loss}, {})]
    for trainer_words, words in outside:
        with pytest.warns(UserWarning, match="called without labels") as caught:
            step(model_of("bert"), examples("bert"), tmp_path, 2, 1, trainer_words, max_steps=3,
                 **words)  # fmt: skip
        assert sum("called without labels" in str(w.message) for w in caught) == 1


def test_such_a_loss_can_take_them_from_a_watch(tmp_path):
    model, data = model_of("bert"), examples("bert")
    with watch(model) as routes, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*called without labels")

        def with_balance(outputs, labels, num_items_in_batch=None):
            return own_loss(outputs, labels) + routes.loss()

        got = step(model, data, tmp_path, 8, 1, {"compute_loss_func": with_balance})
    same(got, by_hand(model_of("bert"), [collate(data)], [1.0]))


# -- whole runs ------------------------------------------------------------------------------------


def tokenizer():
    words = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{f"w{i}": i for i in range(3, 32)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]")


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_train_evaluate_save_and_resume(tmp_path, kind):
    data = examples(kind)
    collator = DataCollatorWithPadding(tokenizer()) if kind == "bert" else collate
    words = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
             "load_best_model_at_end": True, "logging_steps": 2, "learning_rate": 0.01,
             "optim": "adamw_torch", "per_device_train_batch_size": 4, "max_steps": 4}  # fmt: skip

    def trainer(model):
        args = arguments(tmp_path / kind, **words)
        return InOrder(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)

    whole = trainer(model_of(kind))
    whole.train()
    best = whole.model.eval()
    logged = [e["eval_loss"] for e in whole.state.log_history if "eval_loss" in e]
    assert whole.evaluate()["eval_loss"] == pytest.approx(min(logged), abs=1e-5)
    with torch.no_grad():
        task = float(best(**collate(data)).loss)
    assert min(logged) == pytest.approx(task, abs=1e-5)  # no balance losses in it

    again = trainer(model_of(kind))
    again.train(resume_from_checkpoint=str(tmp_path / kind / "checkpoint-2"))
    assert again.state.global_step == 4
    same(again.model.state_dict(), best.state_dict(), atol=1e-5)


def test_bf16(tmp_path):
    data = examples("llama")
    got = step(model_of("llama"), data, tmp_path, 8, 1, bf16=True)
    want = step(model_of("llama"), data, tmp_path, 8, 1)
    router = next(n for n in want if "router" in n)
    torch.testing.assert_close(got[router], want[router], atol=2e-2, rtol=0.1)
