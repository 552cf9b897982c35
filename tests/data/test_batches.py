import numpy as np
import pytest
import torch

from data.batches import LETTERS, random_positions, text_batch, windows, with_copies
from helpers import RUN, TWENTY
from schemes.scheme import SCHEMES

NOISE = np.random.default_rng(0).integers(128, 256, 5000).astype(np.uint8)  # no letters
LETTERS_OF_A_STRING = range(*LETTERS)


def same_batch(a, b):
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# Windows


def test_every_position_of_a_window_predicts_its_next_byte():
    x, y = windows(TWENTY, 0, 0, 5, 30)
    assert x.shape == y.shape == (5, 30) and x.dtype == y.dtype == torch.uint8
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal((x + 1) % 20, y)  # the text counts 0 … 19 again and again


def test_windows_come_from_anywhere_in_the_text():
    text = np.arange(50, dtype=np.uint8)
    x, y = windows(text, 0, 0, 2000, 8)
    assert set(x[:, 0].tolist()) == set(range(42))  # the last window ends at the last byte
    assert y.max() == 49


def test_a_batch_is_a_function_of_seed_and_step():
    batches = {key: windows(NOISE, *key, 4, 16) for key in ((0, 0), (0, 1), (1, 0))}
    assert all(same_batch(batches[key], windows(NOISE, *key, 4, 16)) for key in batches)
    firsts = [batch[0] for batch in batches.values()]
    assert not torch.equal(firsts[0], firsts[1]) and not torch.equal(firsts[0], firsts[2])


def test_batches_are_alike_for_all_schemes():
    first, *others = (text_batch(NOISE, RUN.replace(scheme=name), 3) for name in SCHEMES)
    assert all(same_batch(first, batch) for batch in others)


def test_drawing_a_batch_moves_no_generator_of_torch():
    before = torch.get_rng_state()
    text_batch(NOISE, RUN.replace(copies=True, random_positions=64), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_lengths_take_turns_with_as_many_bytes_each():
    run = RUN.replace(train_lens=(8, 16, 64), batch_size=3)
    shapes = [tuple(text_batch(NOISE, run, step)[0].shape) for step in range(4)]
    assert shapes == [(24, 8), (12, 16), (3, 64), (24, 8)]


def test_a_plain_batch_leaves_positions_to_the_network():
    assert text_batch(NOISE, RUN, 0)[2] is None


# Copies


def period(row):
    """The smallest period of a row of letters."""
    row = row.numpy()
    return next(p for p in range(1, len(row) + 1) if np.array_equal(row[p:], row[:-p]))


def test_half_of_the_windows_repeat_a_random_string():
    x, y = with_copies(*windows(NOISE, 0, 0, 9, 100), 0, 0)
    is_string = [set(row.tolist()) <= set(LETTERS_OF_A_STRING) for row in x]
    assert is_string == [True] * 5 + [False] * 4
    assert torch.equal(x[:, 1:], y[:, :-1])
    periods = {period(row) for row in torch.cat((x, y[:, -1:]), dim=1)[:5]}
    assert len(periods) > 1 and all(16 <= length <= 75 for length in periods)


def test_the_other_half_of_the_windows_is_as_without_copies():
    plain, copied = (text_batch(NOISE, RUN.replace(copies=c, batch_size=4), 2) for c in (0, 1))
    assert torch.equal(plain[0][2:], copied[0][2:]) and torch.equal(plain[1][2:], copied[1][2:])
    assert not torch.equal(plain[0][:2], copied[0][:2])


def test_copies_are_a_function_of_seed_and_step():
    x, y = windows(NOISE, 0, 0, 2, 50)
    first, again, other = (with_copies(x, y, 0, step) for step in (1, 1, 2))
    assert same_batch(first, again) and not same_batch(first, other)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_short_windows_hold_copies_too(length):
    x, y = with_copies(*windows(NOISE, 0, 0, 3, length), 0, 0)
    assert x.shape == y.shape == (3, length)
    assert set(x[0].tolist()) <= set(LETTERS_OF_A_STRING)


# Random positions


def test_random_positions_are_in_order_and_different():
    drawn = random_positions(0, 0, 64, 256)
    assert drawn.dtype == torch.int64 and drawn.shape == (64,)
    assert (drawn.diff() > 0).all() and 0 <= drawn[0] and drawn[-1] < 256


def test_random_positions_are_a_function_of_seed_and_step():
    first, again = random_positions(1, 5, 16, 64), random_positions(1, 5, 16, 64)
    assert torch.equal(first, again)
    assert not torch.equal(first, random_positions(1, 6, 16, 64))
    assert not torch.equal(first, random_positions(2, 5, 16, 64))


def test_as_many_random_positions_as_there_are_take_all():
    assert torch.equal(random_positions(0, 0, 16, 16), torch.arange(16))


def test_more_random_positions_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="17 bytes do not fit in 16 random positions"):
        random_positions(0, 0, 17, 16)


def test_a_run_of_random_positions_has_other_ones_in_each_step():
    run = RUN.replace(random_positions=64)
    first, second = (text_batch(NOISE, run, step)[2] for step in (0, 1))
    assert first.shape == second.shape == (16,) and not torch.equal(first, second)
