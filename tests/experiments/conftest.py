import hashlib

import numpy as np
import pytest

from data.corpus import Corpus
from experiments.setup import Setup
from helpers import CPU, RUN, song
from lab.provenance import random_network
from schemes.scheme import SCHEMES

L = 64


def corpus_of(text):
    """A Corpus whose last tenth is held out."""
    data, cut = np.frombuffer(text, np.uint8), len(text) * 9 // 10
    sha256 = hashlib.sha256(text).hexdigest()
    return Corpus("words.txt", sha256, 1, "the last 10 % of the file", data[:cut], data[cut:])


@pytest.fixture
def setup(tmp_path):
    """A Setup in small, with random networks of all five schemes."""
    corpus = corpus_of(song(3000))
    run = RUN.replace(sha256=corpus.sha256, train_lens=(L,), trained_len=L, max_len=16 * L)
    run, models = run.replace(n_layer=2, steps=10), []
    names = ("dim", "n_layer", "n_head", "trained_len", "max_len")
    size = {name: getattr(run, name) for name in names}
    for scheme in SCHEMES:
        models.append((run.replace(scheme=scheme), random_network(scheme=scheme, **size)))
    return Setup(corpus=corpus, device=CPU, out=tmp_path, models=models, quick=True)
