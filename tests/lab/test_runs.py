import dataclasses
import json
from dataclasses import FrozenInstanceError

import pytest
import torch

from data.batches import random_positions, text_batch
from helpers import RUN, TWENTY
from lab.runs import RECIPE, Run, differences


def test_a_run_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        RUN.steps = 3


def test_runs_are_the_same_whatever_their_text_is_called():
    assert RUN == RUN.replace(data="/elsewhere/words.txt")
    assert hash(RUN) == hash(RUN.replace(data="/elsewhere/words.txt"))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Run) if f.compare])
def test_runs_that_differ_in_any_other_field_are_not_the_same(field):
    assert RUN != RUN.replace(**{field: object()})


def test_every_field_has_a_default():
    assert Run().train_len == 256


def test_a_run_comes_back_from_json_as_it_was():
    run = RUN.replace(start=RUN.replace(scheme="sin", train_lens=(8, 16)), train_lens=(64,))
    again = Run.from_dict(json.loads(json.dumps(run.as_dict())))
    assert again == run and hash(again) == hash(run)
    assert again.start.train_lens == (8, 16)


def test_an_old_run_without_newer_fields_has_their_defaults():
    saved = RUN.as_dict()
    del saved["copies"], saved["start"], saved["start_weights"]
    assert Run.from_dict(saved) == RUN


def test_a_run_with_unknown_fields_is_refused():
    with pytest.raises(TypeError):
        Run.from_dict(RUN.as_dict() | {"dropout": 0.1})


def test_the_training_length_is_the_largest():
    assert RUN.replace(train_lens=(8, 64, 16)).train_len == 64


@pytest.mark.parametrize("lengths, batch_size", [((16,), 2), ((8, 16), 3), ((8, 12, 16), 5)])
def test_tokens_are_those_of_all_batches(lengths, batch_size):
    run = RUN.replace(train_lens=lengths, batch_size=batch_size, steps=7)
    assert run.tokens == sum(text_batch(TWENTY, run, step)[0].numel() for step in range(7))


def test_a_flat_run_has_plain_cells_and_its_start_in_two():
    plain = RUN.flat()
    assert plain["tokens"] == 12 * 2 * 16 and "start" not in plain
    assert (plain["start_scheme"], plain["start_len"]) == ("", 0)
    tuned = RUN.replace(scheme="rope:scaling=linear,factor=4", start=RUN).flat()
    assert (tuned["start_scheme"], tuned["start_len"]) == ("rope", 16)
    assert set(RECIPE) <= set(plain)


def test_a_new_model_has_the_size_and_scheme_of_the_run():
    model = RUN.replace(scheme="learned").new_model()
    assert model.embed.weight.shape == (256, 16) and len(model.blocks) == 1
    assert model.position.max_len == 256
    assert len(RUN.new_model(n_layer=3).blocks) == 3


def test_a_model_is_read_by_itself():
    model = RUN.new_model()
    assert RUN.read_by(model) is model


def test_a_model_of_random_positions_is_read_at_such_positions():
    run = RUN.replace(scheme="sin", random_positions=64)
    model, ids = run.new_model(), torch.arange(16).repeat(2, 1)
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad():
        found = run.read_by(model)(ids)
        expected = model(ids, random_positions(0, 0, 16, 64))
        plain = model(ids)
    assert torch.equal(found, expected) and not torch.equal(found, plain)
    assert torch.equal(run.read_by(model)(ids), found)  # the same positions every time


@pytest.mark.parametrize("change, words", [
    (dict(lr=0.01), "lr 0.02, not 0.01"),
    (dict(train_lens=(8, 16)), "train_lens 16, not 8 16"),
    (dict(sha256="x"), "other text"),
    (dict(held_out="x"), "another part held out"),
    (dict(start=RUN), "another start"),
    (dict(start=RUN, start_weights="x"), "another start"),
    (dict(steps=13, lr=0.01), "steps 12, not 13, lr 0.02, not 0.01"),
    (dict(data="elsewhere"), ""),
])  # fmt: skip
def test_differences_are_told_in_words(change, words):
    assert differences(RUN, RUN.replace(**change)) == words
