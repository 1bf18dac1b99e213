"""What a GPU computes: what the CPU does, for every method. `make test-gpu` runs these.

Compiled networks there are tested in `test_compilation.py`, next to those of the CPU.
"""

import copy

import lightning as L
import pytest
import torch
from methods import IN_FULL, METHODS

from lightning_models.generation import SamplingConfig, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = torch.device("cuda")
GREEDY = SamplingConfig(temperature=0)


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def method(request):
    return request.param


def there(value):
    if not isinstance(value, dict):
        return copy.deepcopy(value).to(DEVICE)
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in value.items()}


def objective(model, batch):
    return sum(term.sum / term.normaliser for term in model.loss(batch).terms.values())


def test_scores_are_those_of_the_cpu(method):
    model, batch = method.build().eval(), method.batch()
    expected, found = model.score(batch), there(model).score(there(batch))
    assert found.log_prob.device.type == DEVICE.type
    for key in ("log_prob", "sequence_term"):
        mine, theirs = getattr(found, key).cpu(), getattr(expected, key)
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_gradients_are_those_of_the_cpu(method):
    model, batch = method.build(), method.batch()
    other = there(model)
    objective(model, batch).backward()
    objective(other, there(batch)).backward()
    gradients = [
        torch.cat([p.grad.flatten().cpu() for p in m.network.parameters() if p.grad is not None])
        for m in (model, other)
    ]
    assert (gradients[0] - gradients[1]).norm() < 1e-2 * gradients[0].norm()


def test_greedy_tokens_are_those_of_the_cpu(method):
    if not method.continues:
        pytest.skip("what it has written is no part of a prompt")
    model, prompts = method.build(seed=1).eval(), method.format.prompts
    options = {"max_new_tokens": 10, "sampling": GREEDY}
    expected = generate(model, prompts, **options)
    assert generate(there(model), prompts, device=DEVICE, **options) == expected


@pytest.mark.parametrize("method", IN_FULL, ids=lambda method: method.name)
def test_bf16_trains(method, request, tmp_path):
    model = method.build()
    untrained = copy.deepcopy(model)
    data = request.getfixturevalue(method.format.fixture)()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=30,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data)
    batch = next(iter(data.train_dataloader()))
    losses = [objective(m.cpu().train(), batch).item() for m in (untrained, model)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash_attn"])
@pytest.mark.parametrize("window", [None, 8])
def test_attention_backends_agree(backend, window):
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    sizes = {"dim": 64, "num_heads": 2, "window": window}
    models = [
        there(METHODS[0].build(attention_backend=name, **sizes)) for name in ("math", backend)
    ]
    batch = there(METHODS[0].batch())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected, found = (objective(model, batch) for model in models)
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
