import math

import numpy as np
import pytest
import torch

from experiments import bag
from experiments.bag import ATTENTION, bag_network, bags_and_next, read_bag
from lab.rows import values
from tiny_lm import TinyLM


def test_the_target_of_a_bag_is_the_byte_after_it():
    data = np.arange(200, dtype=np.uint8)
    for width in (1, 4, 64):
        ids, target = bags_and_next(data, width, 50, np.random.default_rng(0))
        assert ids.shape == (50, width) and (ids.long().diff() == 1).all()
        assert torch.equal(target, ids[:, -1].long() + 1)
        assert len(set(ids[:, 0].tolist())) > 20 and target.max() <= 199


@pytest.mark.parametrize("average", [False, True])
def test_a_bag_has_no_order(average):
    torch.manual_seed(0)
    model, causal = bag_network().double(), TinyLM("none", 64, 2, 4).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0, 0.3)
    causal.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (20, 12))
    mixed, other = ids[:, torch.randperm(12)], ids.clone()
    other[:, 3] = (other[:, 3] + 1) % 256
    own = read_bag(model, ids, average)
    assert torch.allclose(own, read_bag(model, mixed, average), rtol=0, atol=1e-11)
    # every byte counts
    assert (own - read_bag(model, other, average)).abs().amax(-1).min() > 1e-6
    if not average:
        moved = read_bag(causal, ids, average) - read_bag(causal, mixed, average)
        assert moved.abs().max() > 1e-3


@pytest.mark.parametrize(
    "best, gain, pairs, verdict",
    [
        (4, 3.0, 9.5, "refuted"),
        (1, 3.0, 9.5, "confirmed"),
        (16, 0.02, 9.5, "partly"),
        (4, 3.0, 1.2, "partly"),
    ],
)
def test_bag_judges_by_how_much_the_best_width_is_better(
    setup, monkeypatch, best, gain, pairs, verdict
):
    """One width is guessed a little or much better, by a model that is not trained at all."""

    def zeros(data, width, count, rng):
        return torch.zeros(count, width, dtype=torch.uint8), torch.zeros(count, dtype=torch.long)

    def read(model, ids, average):
        logits = torch.zeros(len(ids), 256)
        logits[:, 0] = 3.4 + gain * (ids.shape[1] == best)
        return logits

    def untrained(model, *arguments, **options):
        return model

    def count_ppl(train, val, back):
        return pairs

    monkeypatch.setattr(bag, "fit", untrained)
    monkeypatch.setattr(bag, "bags_and_next", zeros)
    monkeypatch.setattr(bag, "read_bag", read)
    monkeypatch.setattr(bag, "count_model_ppl", count_ppl)  # 256 logits, one of 3.4: 9.5
    rows = bag.measure(setup)
    assert bag.judge(rows).verdict == verdict
    ppl = {width: values(rows, model=ATTENTION, width=width)[0] for width in bag.BAGS}
    assert ppl[best] == pytest.approx(1 + 255 * math.exp(-3.4 - gain))
    assert max(ppl.values()) == pytest.approx(1 + 255 * math.exp(-3.4))
    table, picture = bag.show(rows)
    assert "| counts of pairs of bytes | 1 | " in table and "| alibi | 64 | " in table
    assert picture.lines[ATTENTION] == ([1, 4, 16, 64], list(ppl.values()))
    assert len(set(picture.lines["none"][1])) == 1


def test_bag_is_trained_on_the_text_of_the_models(setup, monkeypatch):
    monkeypatch.setattr(bag, "BATCH", 64)
    rows = bag.measure(setup)
    ppl = [values(rows, model=ATTENTION, width=width)[0] for width in bag.BAGS]
    assert max(ppl) < 250  # 256 without any training


def test_bag_needs_none(setup):
    setup.models = setup.models[:2]
    with pytest.raises(ValueError, match="it needs a checkpoint of none"):
        bag.measure(setup)
