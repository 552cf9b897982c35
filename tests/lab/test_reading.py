import pytest
import torch

from helpers import RUN, same_weights
from lab.provenance import random_network
from lab.reading import Reading, network_of, reader, readings, ways_of, why_not
from schemes.rope_scaling import SCALINGS
from tiny_lm import TinyLM

PLAIN = Reading()
IDS = torch.arange(64).repeat(2, 1)


def run_of(scheme, **more):
    return RUN.replace(scheme=scheme, **more)


def network(run):
    """A random network of a run, so that every part of it does something."""
    names = ("scheme", "dim", "n_layer", "n_head", "trained_len", "max_len", "window")
    return random_network(**{name: getattr(run, name) for name in names})


# Which readings there are


@pytest.mark.parametrize("scheme, ways", [
    ("rope", SCALINGS[1:]), ("learned", ("clamp", "wrap", "interpolate")), ("sin", ("linear",)),
    ("alibi", ()), ("none", ()), ("rope:scaling=yarn,factor=2", ()), ("learned:beyond=wrap", ()),
])  # fmt: skip
def test_the_ways_are_those_that_the_scheme_has_and_does_not_fix(scheme, ways):
    assert ways_of(run_of(scheme)) == tuple(ways)


def test_a_model_of_random_positions_has_no_ways():
    assert ways_of(run_of("rope", random_positions=64)) == ()


@pytest.mark.parametrize("scheme, wanted, found", [
    ("rope", dict(), [PLAIN]),
    ("rope", dict(scaling=["yarn"]), [Reading("yarn")]),
    ("rope", dict(scaling=["none", "yarn"]), [PLAIN, Reading("yarn")]),
    ("rope", dict(scaling=["yarn", "linear"]), [Reading("linear"), Reading("yarn")]),
    ("rope", dict(scaling=["yarn"], factor=4.0), [Reading("yarn", 4.0)]),
    ("rope", dict(beyond=["wrap"]), [PLAIN]),  # it has no such way
    ("learned", dict(scaling=["yarn"], beyond=["wrap"]), [Reading("wrap")]),
    ("learned", dict(beyond=["untrained", "clamp"]), [PLAIN, Reading("clamp")]),
    ("learned", dict(beyond=["clamp"], factor=4.0), [Reading("clamp")]),  # it takes no factor
    ("sin", dict(scaling=SCALINGS), [PLAIN, Reading("linear")]),
    ("alibi", dict(scaling=["yarn"]), [PLAIN]),
    ("none", dict(windows=[0, 8]), [PLAIN, Reading(window=8)]),
    ("none", dict(windows=[8]), [Reading(window=8)]),
    ("rope", dict(scaling=["yarn"], windows=[0, 8]), [Reading("yarn"), Reading(window=8)]),
])  # fmt: skip
def test_the_wanted_readings_are_those_that_the_scheme_has(scheme, wanted, found):
    assert readings(run_of(scheme), **wanted) == found


def test_a_window_is_not_wider_than_that_of_the_training():
    run = run_of("rope", window=8)
    assert readings(run, windows=[0, 4, 8, 16]) == [PLAIN, Reading(window=4)]


def test_a_reading_has_the_fields_of_a_row():
    assert Reading("yarn", 2.0, 8).fields() == dict(way="yarn", factor=2.0, read_window=8)


# In which network a reading takes place


@pytest.mark.parametrize("reading, n, found", [
    (PLAIN, 64, ("rope", 0)),
    (Reading("linear"), 64, ("rope:scaling=linear,factor=4,trained_len=16", 0)),
    (Reading("linear"), 16, ("rope", 0)),  # nothing is past the trained length yet
    (Reading("linear"), 8, ("rope", 0)),
    (Reading("linear", 2.5), 16, ("rope:scaling=linear,factor=2.5,trained_len=16", 0)),
    (Reading("linear", 2.5), 64, ("rope:scaling=linear,factor=2.5,trained_len=16", 0)),
    (Reading(window=8), 64, ("rope", 8)),
    (Reading(window=8), 9, ("rope", 8)),
    (Reading(window=8), 8, ("rope", 0)),  # the window holds the whole text
])  # fmt: skip
def test_a_reading_names_its_network(reading, n, found):
    assert network_of(RUN, reading, n) == found


@pytest.mark.parametrize("window, narrowest", [(0, 8), (4, 4), (12, 8)])
def test_the_window_is_the_narrower_of_reading_and_training(window, narrowest):
    run = run_of("rope", window=8)
    assert network_of(run, Reading(window=window), 64) == ("rope", narrowest)


def test_options_of_the_scheme_are_kept():
    scheme, _ = network_of(run_of("rope:base=10"), Reading("ntk"), 32)
    assert scheme == "rope:base=10,scaling=ntk,factor=2,trained_len=16"


# Reading


def test_a_model_that_is_read_as_it_is_stays_itself():
    model = network(RUN)
    assert reader(model, RUN, PLAIN, 64) is model
    assert reader(model, RUN, Reading("yarn"), 16) is model


@pytest.mark.parametrize("scheme, reading, changes", [
    ("rope", Reading("yarn"), dict(scheme="rope:scaling=yarn,factor=4,trained_len=16")),
    ("sin", Reading("linear"), dict(scheme="sin:factor=4")),
    ("learned", Reading("wrap"), dict(scheme="learned:beyond=wrap,trained_len=16")),
    ("alibi", Reading(window=8), dict(window=8)),
])  # fmt: skip
def test_a_reading_is_the_same_weights_in_another_network(scheme, reading, changes):
    run = run_of(scheme)
    model = network(run)
    read = reader(model, run, reading, 64)
    size = dict(scheme=scheme, dim=16, n_layer=1, n_head=2, trained_len=16, max_len=256)
    other = TinyLM(**size | changes)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, expected, plain = read(IDS), other.eval()(IDS), model(IDS)
    assert torch.equal(found, expected) and not torch.allclose(found, plain)
    assert same_weights(read.state_dict(), model.state_dict())


def test_a_reading_keeps_the_dtype_and_draws_no_dropout():
    model = network(RUN).bfloat16()
    read = reader(model, RUN, Reading("ntk"), 64)
    assert next(read.parameters()).dtype == torch.bfloat16 and not read.training


def test_a_model_of_random_positions_is_read_at_such_positions():
    run = run_of("sin", random_positions=64)
    model = network(run)
    with torch.no_grad():
        found, plain = reader(model, run, Reading(window=8), 64)(IDS), model(IDS)
    assert not torch.allclose(found, plain)


# Notes


@pytest.mark.parametrize("error, note", [
    (ValueError("128 bytes do not fit in 64 random positions"), "128 bytes do not fit in 64"),
    (RuntimeError("CUDA out of memory. Tried to"), "out of memory"),
    (MemoryError("cannot allocate memory"), "out of memory"),
    (IndexError("index 32 is out of bounds\nmore"), "IndexError: index 32 is out of bounds"),
    (KeyError(), "KeyError"),
])  # fmt: skip
def test_a_note_says_why_a_model_could_not_be_read(error, note):
    told = why_not(error, network(RUN), RUN, 512)
    assert told.startswith(note) and "\n" not in told


def test_a_note_names_the_rows_of_a_table_that_is_too_short():
    run = run_of("learned", max_len=32)
    error = ValueError("position 63 has no row: max_len is 32")
    assert why_not(error, network(run), run, 64) == "max_len 32"
