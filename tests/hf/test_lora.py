"""LoRA of `peft` on the rest of an upcycled model."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from moiety import watch
from moiety.hf.upcycle import receipt, upcycle

peft = pytest.importorskip("peft")

IDS = torch.arange(18).view(3, 6) + 3
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}


def dense():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=32,
                         num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)  # fmt: skip
    return LlamaForCausalLM(config)


def sparse(**options):
    return upcycle(dense(), experts=4, k=2, balance={"switch": 0.5}, **options).train()


def adapted(model, **words):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM",
                             init_lora_weights=False, **words)  # fmt: skip
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("where", [["q_proj"], ["down_proj"]])
def test_adapters_come_after_experts_or_are_merged_before(where):
    config = peft.LoraConfig(target_modules=where, init_lora_weights=False)
    with pytest.raises(ValueError, match="upcycle it first"):
        upcycle(peft.get_peft_model(dense(), config))
    merged = peft.get_peft_model(dense(), config).merge_and_unload()
    assert len(receipt(upcycle(merged)).layers) == 2
    model = dense()
    model.add_adapter(config)
    with pytest.raises(ValueError, match="upcycle it first"):
        upcycle(model)


def train(model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()


def balance_in(model):
    """What training adds to the loss of eval (there is no dropout), and what the watch saw."""
    task = model.eval()(**BATCH).loss
    with watch(model.train()) as routes:
        loss = model(**BATCH).loss
    assert all(r.tokens == MASK.sum() for _, r in routes.records)
    assert len(routes.records) == 2
    return float((loss - task).detach()), sum(t["switch"] for t in routes.terms().values())


@pytest.mark.parametrize("init", ["copy", "low-rank"])
def test_experts_train_beside_lora(init):
    model = adapted(sparse(init=init), modules_to_save=["moe"])
    added, seen = balance_in(model)
    assert seen > 0.5
    assert added == pytest.approx(seen, abs=1e-5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert any("router" in n for n in moved)
    assert any("experts" in n for n in moved)
    assert any("lora_B" in n for n in moved)
    assert all("lora_" in n or "modules_to_save" in n for n in moved)


def test_routers_train_beside_lora():
    model = adapted(sparse(), modules_to_save=["router"])
    added, seen = balance_in(model)
    assert added == pytest.approx(seen, abs=1e-5)
    router = model.base_model.model.model.layers[0].mlp.moe.router.modules_to_save["default"]
    before = router.weight.detach().clone()
    train(model)
    assert not torch.equal(router.weight, before)


def test_experts_may_also_be_set_free_by_hand():
    model = adapted(sparse())
    for name, p in model.named_parameters():
        if ".moe." in name:
            p.requires_grad_()
    added, seen = balance_in(model)
    assert added == pytest.approx(seen, abs=1e-5)
    train(model)
    grads = [p.grad for n, p in model.named_parameters() if "router" in n]
    assert all(g is not None and g.abs().max() > 0 for g in grads)


def test_lora_alone_leaves_routers_and_experts_as_they_are():
    """LoRA still learns to balance: a frozen router passes the gradient on to what it reads."""
    model = adapted(sparse())
    added, seen = balance_in(model)
    assert added == pytest.approx(seen, abs=1e-5)
    train(model)
    assert all("lora_" in n for n, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("part", ["moe", "router"])
def test_an_adapter_is_saved_loaded_and_merged(tmp_path, part):
    model = adapted(sparse(), modules_to_save=[part])
    train(model)
    want = model.eval()(**BATCH).logits
    model.save_pretrained(str(tmp_path))
    other = peft.PeftModel.from_pretrained(sparse(), str(tmp_path)).eval()
    torch.testing.assert_close(other(**BATCH).logits, want)
    merged = other.merge_and_unload()
    assert isinstance(merged, LlamaForCausalLM)
    torch.testing.assert_close(merged.eval()(**BATCH).logits, want, atol=1e-5, rtol=1e-4)
    added, seen = balance_in(merged)
    assert added == pytest.approx(seen, abs=1e-5)


def test_bert_whose_layers_call_the_two_maps_of_a_block_themselves():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=32,
                        num_attention_heads=2, hidden_dropout_prob=0.0)  # fmt: skip
    model = upcycle(BertForSequenceClassification(config), experts=4, k=2, balance={"switch": 0.5})
    words = peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="SEQ_CLS",
                            modules_to_save=["moe", "classifier"])  # fmt: skip
    model = peft.get_peft_model(model, words).train()
    with watch(model) as routes:
        out = model(**{**BATCH, "labels": torch.tensor([0, 1, 1])})
    out.loss.backward()
    assert all(r.tokens == MASK.sum() for _, r in routes.records)
    task = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 1, 1]))
    seen = sum(t["switch"] for t in routes.terms().values())
    assert float((out.loss - task).detach()) == pytest.approx(seen, abs=1e-5)
    moved = [
        n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    ]
    assert any("router" in n for n in moved)
    assert any("experts" in n for n in moved)


def test_adapted_models_checkpoint_and_generate():
    model = adapted(sparse(), modules_to_save=["moe"])
    model(**BATCH).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model(**BATCH).loss.backward()
    for name, p in model.named_parameters():
        if name in want:
            torch.testing.assert_close(p.grad, want[name], atol=1e-6, rtol=1e-5, msg=name)
    model.gradient_checkpointing_disable()
    left = {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
    out = model.eval().generate(**left, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert out.shape == (3, 9)
