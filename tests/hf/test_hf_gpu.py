"""Hugging Face models on a GPU; the same contracts as on a CPU."""

import pytest
import torch
import transformers as T

import moiety

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
}
IDS = torch.arange(4 * 12).view(4, 12) % 90 + 5
MASK = torch.ones_like(IDS)
MASK[1, 7:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)


def batch() -> dict[str, torch.Tensor]:
    return {k: v.cuda() for k, v in (("input_ids", IDS), ("attention_mask", MASK))}


def dense() -> torch.nn.Module:
    torch.manual_seed(0)
    return T.LlamaForCausalLM(T.LlamaConfig(**TINY)).cuda()


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "options",
    [{"init": "copy"}, {"init": "split"}, {"init": "low-rank", "router": "switch"}],
    ids=lambda o: o["init"],
)
def test_an_upcycled_model_keeps_its_function_and_trains(dtype, kept, options):
    model = moiety.upcycle(dense().to(dtype), experts=4, **options).train()
    assert moiety.receipt(model).gap <= kept
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {p.dtype for p in model.parameters()} == {dtype}
    with moiety.watch(model) as routes:
        loss = model(**batch(), labels=LABELS.cuda()).loss
    assert all(s.tokens == int(MASK.sum()) for s in routes.summary().values())
    assert any(routes.terms().values())  # taken by the model already
    loss.backward()
    experts = [p for g in moiety.param_groups(model) if g["name"] == "experts" for p in g["params"]]
    assert all(p.grad is not None for p in experts if p.requires_grad)
    assert any(float(p.grad.abs().max()) > 0 for p in experts if p.requires_grad)


def test_tf32_does_not_spoil_the_proof(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert moiety.receipt(moiety.upcycle(dense(), experts=4, k=2)).gap <= 1e-5
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_autocast_and_gradient_checkpointing_agree_with_without():
    model = moiety.upcycle(dense(), experts=4, k=2, balance={"switch": 0.1}).train()

    def step() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch(), labels=LABELS.cuda()).loss
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    plain, plain_grad = step()
    model.gradient_checkpointing_enable()
    again, again_grad = step()
    assert again == pytest.approx(plain, rel=1e-5)
    assert torch.allclose(again_grad, plain_grad, atol=1e-3)


def test_saved_on_a_gpu_loads_on_a_cpu_and_back(tmp_path):
    model = moiety.upcycle(dense(), experts=4, k=2).eval()
    moiety.save(model, tmp_path)
    on_cpu, on_gpu = moiety.load(tmp_path), moiety.load(tmp_path, device="cuda")
    state = model.state_dict()
    for again in (on_cpu, on_gpu):
        assert all(torch.equal(t.cuda(), state[n]) for n, t in again.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(on_gpu(**batch()).logits, model(**batch()).logits, atol=1e-5)


def test_generation_is_that_of_the_dense_model():
    model = dense().eval()
    words = {"max_new_tokens": 6, "do_sample": False}
    ids, left = IDS.cuda(), MASK.flip(1).cuda()  # padding on the left
    wanted = model.generate(input_ids=ids, attention_mask=left, **words)
    sparse = moiety.upcycle(model, experts=4, k=2)
    assert torch.equal(sparse.generate(input_ids=ids, attention_mask=left, **words), wanted)


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe"])
def test_native_layers_are_watched_and_replayed(kind):
    torch.manual_seed(0)
    config = getattr(T, f"{kind}Config")(**TINY, num_experts_per_tok=2)
    model = getattr(T, f"{kind}ForCausalLM")(config).cuda().eval()
    with torch.no_grad(), moiety.watch(model, keep="choice") as routes:
        wanted = model(**batch()).logits
    for summary in routes.summary().values():
        assert summary.tokens == int(MASK.sum())
        assert 0 < sum(summary.padding) < 0.2
    with torch.no_grad(), moiety.replay(model, routes):
        assert torch.allclose(model(**batch()).logits, wanted, atol=1e-5)
