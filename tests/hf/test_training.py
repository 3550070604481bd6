"""Upcycled models in training: what `outputs.loss` holds, and when."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import transformers as T
from torch.nn import functional as F

from moiety import watch
from moiety.hf.upcycle import upcycle
from moiety.routing import balance

SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
IMAGE = {**SIZE, "image_size": 8, "patch_size": 4}
WEIGHTS = {"switch": 0.3, "z": 0.05}
IDS = torch.arange(18).view(3, 6) + 3
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
LABELS = IDS.masked_fill(MASK == 0, -100)
TEXT = {"input_ids": IDS, "attention_mask": MASK}


def bert(p):
    config = T.BertConfig(**SIZE, vocab_size=32, num_labels=3, hidden_dropout_prob=p,
                          attention_probs_dropout_prob=p)  # fmt: skip
    return T.BertForSequenceClassification(config), {**TEXT, "labels": torch.tensor([0, 2, 1])}


def gpt2(p):
    config = T.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16,
                          resid_pdrop=p, embd_pdrop=p, attn_pdrop=p)  # fmt: skip
    return T.GPT2LMHeadModel(config), {**TEXT, "labels": LABELS}


def llama(p):
    config = T.LlamaConfig(**SIZE, vocab_size=32, num_key_value_heads=1, pad_token_id=0,
                           attention_dropout=p)  # fmt: skip
    return T.LlamaForCausalLM(config), {**TEXT, "labels": LABELS}


def t5(p):
    config = T.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                        decoder_start_token_id=0, dropout_rate=p)  # fmt: skip
    return T.T5ForConditionalGeneration(config), {**TEXT, "labels": LABELS[:, :4].contiguous()}


def vit(p):
    config = T.ViTConfig(**IMAGE, num_labels=3, hidden_dropout_prob=p)
    batch = {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 2, 1])}
    return T.ViTForImageClassification(config), batch


def vit_mae(p):
    config = T.ViTMAEConfig(**IMAGE, decoder_hidden_size=12, decoder_num_hidden_layers=1,
                            decoder_num_attention_heads=2, decoder_intermediate_size=16,
                            hidden_dropout_prob=p)  # fmt: skip
    batch = {"pixel_values": torch.randn(3, 3, 8, 8), "noise": torch.rand(3, 4)}
    return T.ViTMAEForPreTraining(config), batch


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "vit-mae": vit_mae}


def sparse(name, dropout=0.0, weights=WEIGHTS, **options):
    """An upcycled model in training mode and a batch for it."""
    model, batch = MODELS[name](dropout)
    return upcycle(model, experts=4, k=2, balance=weights, **options).train(), batch


def task_loss(name, model, batch, out):
    """The loss of the dense model's papers, from the outputs alone."""
    labels = batch.get("labels")
    if name in ("bert", "vit"):
        return F.cross_entropy(out.logits, labels)
    if name == "t5":
        return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    if name == "vit-mae":
        gap = (out.logits - model.patchify(batch["pixel_values"])).square().mean(-1)
        return gap[out.mask.bool()].mean()
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def weighed(routes):
    """Σ weight · loss over layers and calls, from the recorded decisions."""
    decisions = [r for name in routes.layers for r in routes[name]]
    return sum(w * getattr(balance, loss)(r) for r in decisions for loss, w in WEIGHTS.items())


def total(terms):
    return sum(sum(layer.values()) for layer in terms.values())


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# -- what the loss holds ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_in_training_the_loss_is_the_task_and_the_weighted_balance_losses(name):
    model, batch = sparse(name, dropout=0.1)
    with watch(model, keep="all") as routes:
        out = model(**batch)
    by_hand = weighed(routes).detach()
    assert by_hand > 0.1
    want = task_loss(name, model, batch, out) + by_hand
    torch.testing.assert_close(out.loss, want, atol=1e-6, rtol=1e-6)
    assert total(routes.terms()) == pytest.approx(float(by_hand), abs=1e-6)
    with pytest.raises(ValueError, match="already holds the balance losses"):
        routes.loss()
    assert total(routes.terms()) == pytest.approx(float(by_hand), abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_in_eval_it_is_the_task_alone(name):
    model, batch = sparse(name)
    out = model.eval()(**batch)
    want = task_loss(name, model, batch, out)
    torch.testing.assert_close(out.loss, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_tuples_hold_the_same_loss(name):
    model, batch = sparse(name)
    named, plain = model(**batch), model(**batch, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], named.loss)
    torch.testing.assert_close(plain[1], named.logits)


def test_its_gradient_is_that_of_the_sum():
    model, batch = sparse("llama")
    model(**batch).loss.backward()
    got = gradients(model)
    model.zero_grad()
    with watch(model, keep="all") as routes:
        out = model(**batch)
    (task_loss("llama", model, batch, out) + weighed(routes)).backward()
    for name, want in gradients(model).items():
        torch.testing.assert_close(got[name], want, atol=1e-6, rtol=1e-5, msg=name)
    assert any("router" in name and g.abs().max() > 0 for name, g in got.items())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_without_labels_the_watch_has_the_losses(name):
    model, batch = sparse(name)
    del batch["labels"]
    if name == "t5":
        batch["decoder_input_ids"] = IDS[:, :4]
    with warnings.catch_warnings(), watch(model, keep="all") as routes:
        warnings.simplefilter("error")
        out = model(**batch)
        loss = routes.loss()
    assert out.loss is None
    torch.testing.assert_close(loss, weighed(routes))


def test_without_labels_and_without_a_watch_one_warning_says_so():
    model, _ = sparse("bert")
    with pytest.warns(UserWarning, match="called without labels") as caught:
        _ = [model(**TEXT) for _ in range(3)]
    assert len(caught) == 1


@pytest.mark.parametrize("mode", ["labels", "eval", "no_grad", "balance={}"])
def test_nothing_warns_where_nothing_is_missed(mode):
    model, batch = sparse("bert", weights={} if mode == "balance={}" else WEIGHTS)
    model.train(mode != "eval")
    with warnings.catch_warnings(), torch.set_grad_enabled(mode != "no_grad"):
        warnings.simplefilter("error")
        model(**(batch if mode == "labels" else TEXT))


def test_an_inner_model_called_alone_says_that_nothing_collects_its_losses():
    model, _ = sparse("bert")
    with pytest.warns(UserWarning, match="nothing collects them"):
        model.bert(**TEXT)
    with warnings.catch_warnings(), watch(model) as routes:
        warnings.simplefilter("error")
        model.bert(**TEXT)
        assert routes.loss() > 0


def test_a_watch_holds_the_losses_of_calls_without_labels_after_one_with():
    model, batch = sparse("bert")
    with watch(model) as routes:
        model(**batch)
        model(**TEXT)
        assert routes.loss() > 0
        model(**batch)
        with pytest.raises(ValueError, match="already"):
            routes.loss()


def test_a_failed_forward_leaves_nothing_for_the_next():
    model, batch = sparse("bert")
    want = model(**batch).loss
    with pytest.raises(ValueError, match="batch_size"):
        model(**{**batch, "labels": torch.tensor([0])})
    torch.testing.assert_close(model(**batch).loss, want)


def test_a_frozen_router_is_told_once():
    model, batch = sparse("bert")
    for name, p in model.named_parameters():
        p.requires_grad_("classifier" in name)
    with pytest.warns(UserWarning, match="carry no gradient") as caught:
        _ = [model(**batch).loss for _ in range(3)]
    assert len(caught) == 1


# -- how the loss is computed ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_gradient_checkpointing_changes_nothing(name):
    model, batch = sparse(name)
    found = []
    for repeated in (False, True):
        if repeated:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with watch(model) as routes:
            loss = model(**batch).loss
            loss.backward()
        found.append((loss.detach(), total(routes.terms()), len(routes.records), gradients(model)))
    (loss, terms, calls, grads), (loss_2, terms_2, calls_2, grads_2) = found
    torch.testing.assert_close(loss, loss_2)
    assert terms == pytest.approx(terms_2, abs=1e-6)
    assert calls == calls_2
    assert grads.keys() == grads_2.keys()
    for name, want in grads.items():
        torch.testing.assert_close(grads_2[name], want, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, batch = sparse("llama")
    with torch.autocast("cpu", dtype), watch(model, keep="all") as routes:
        out = model(**batch)
    out.loss.backward()
    out.logits = out.logits.float()
    want = task_loss("llama", model, batch, out) + weighed(routes)
    torch.testing.assert_close(out.loss, want, atol=1e-4, rtol=1e-4)
    assert all(g.isfinite().all() for g in gradients(model).values())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled(name):
    model, batch = sparse(name, layers="last:1")
    want = model(**batch).loss
    want.backward()
    grads = gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, want)
    for key, got in gradients(model).items():
        torch.testing.assert_close(got, grads[key], atol=1e-6, rtol=1e-5, msg=key)


# -- the labels of a whole step, as the Trainer hands them over ------------------------------------


def test_the_share_counts_shifted_labels_where_they_are_given():
    model, batch = sparse("llama")
    items = 2 * int(LABELS[:, 1:].ne(-100).sum())
    want = model(**batch).loss / 2
    torch.testing.assert_close(model(**batch, num_items_in_batch=items).loss, want)
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    got = model(**batch, shift_labels=shifted, num_items_in_batch=items).loss
    torch.testing.assert_close(got, want)


def test_a_loss_that_takes_the_count_and_ignores_it_keeps_its_balance():
    model, batch = sparse("vit")
    batch["labels"] = torch.rand(3, 3).round()  # many labels: a mean, whatever the count
    want = model(**batch).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=12).loss, want)


def test_a_loss_function_of_ones_own_stays():
    model, batch = sparse("llama")

    def own(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        return logits.new_tensor(1 / num_items_in_batch)

    model.loss_function = own
    items = int(LABELS[:, 1:].ne(-100).sum())
    with watch(model) as routes:
        loss = model(**batch, num_items_in_batch=items).loss.detach()
    assert float(loss) == pytest.approx(1 / items + total(routes.terms()), abs=1e-6)
    assert model.loss_function is own


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_losses_and_masks_of_its_own(copied):
    model, batch = sparse("bert")
    twin = copied(model)
    want = model(**batch).loss
    with watch(model) as routes, watch(twin) as own:
        torch.testing.assert_close(twin(**batch).loss, want)
    assert not routes.records
    assert all(r.tokens == MASK.sum() for _, r in own.records)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if "router" in name:
                p.mul_(9)
    assert not torch.allclose(twin(**batch).loss, want)
    torch.testing.assert_close(model(**batch).loss, want)


def test_a_model_that_is_deleted_is_gone_at_once():
    model, batch = sparse("llama")
    model(**batch).loss.backward()
    gone = weakref.ref(model), weakref.ref(model.model.layers[0].mlp.moe)
    gc.disable()  # it would free what holds itself, some time, and a GPU does not wait for it
    try:
        del model
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def with_copied_layers():
    """peft replaces trained parts by copies."""
    model, batch = sparse("llama")
    for block in model.model.layers:
        block.mlp.moe = copy.deepcopy(block.mlp.moe)
    return model, batch


def test_a_copied_layer_still_tells_its_model_its_losses():
    model, batch = with_copied_layers()
    task = model.eval()(**batch).loss
    with watch(model.train()) as routes:
        loss = model(**batch).loss
    torch.testing.assert_close(float((loss - task).detach()), total(routes.terms()), atol=1e-5,
                               rtol=0)  # fmt: skip
    assert total(routes.terms()) > 0.1


def test_a_copied_layer_still_hears_its_models_mask():
    model, batch = with_copied_layers()
    with watch(model) as routes:
        model(**batch)
    assert all(r.tokens == MASK.sum() for _, r in routes.records)


def test_the_state_dict_carries_all_weights():
    model, batch = sparse("bert")
    torch.manual_seed(7)
    other, _ = sparse("bert")
    assert not torch.allclose(other(**batch).loss, model(**batch).loss)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss)
