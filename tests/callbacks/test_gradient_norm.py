"""The norm that is logged is that of the whole step, before clipping."""

import pytest
import torch

from callbacks import GradientNorm
from tests.callbacks.conftest import Recorder


def whole_gradient_norm(model, data, num_batches):
    """Norm of the gradient of the mean over all targets of the first batches, in one go."""
    data.prepare_data()
    data.setup()
    model.configure_model()
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(num_batches), strict=False)]
    terms = [model.loss(batch).terms["nll"] for batch in batches]
    loss = sum(term.sum for term in terms) / sum(float(term.normaliser) for term in terms)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_norm_of_the_whole_step(clip, accumulate, make_model, make_data, make_trainer):
    recorder = Recorder()
    trainer = make_trainer(
        GradientNorm(),
        recorder,
        max_steps=1,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(make_model(), make_data())
    expected = whole_gradient_norm(make_model(), make_data(), accumulate)
    assert recorder.rows[-1]["train/grad_norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 4]), (3, [3]), (0, [])])
def test_it_is_logged_every_n_steps(every, steps, make_model, make_data, make_trainer):
    recorder = Recorder()
    trainer = make_trainer(GradientNorm(every), recorder, max_steps=5, log_every_n_steps=2)
    trainer.fit(make_model(), make_data())
    values = [row.get("train/grad_norm") for row in recorder.rows]
    changes = [n + 1 for n, value in enumerate(values) if value != ([None, *values][n])]
    assert changes == steps
