"""Words in the wrong order in, the sentence out: trained and tested for each scheme.

    the model reads   cat the hates the dog ⏎ the dog hates the cat ⏎
    and is asked for                          the dog hates the cat ⏎   each byte after the right
                                                                        ones before it

Held-out sentences share their words with no training sentence, in whatever order.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data.corpus import SHAKESPEARE_PATH, load_corpus
from experiments.setup import POSITIONED, Picture, Verdict, mean_of, progress
from lab.checks import check_scheme
from lab.rows import distinct, select, values
from lab.runs import Run
from lab.tables import markdown_table, mean_std_text
from lab.train import fit
from schemes.scheme import SCHEMES
from tiny_lm import TinyLM

LONGEST = 48  # bytes of a sentence
WORDS = (3, 8)  # of a sentence
SIZE = dict(dim=64, n_layer=2, n_head=4, max_len=2 * LONGEST + 2)
STEPS, QUICK_STEPS, BATCH = 300, 30, 64
HELD_OUT = 1000  # sentences at most
NEEDED = 200, 20  # sentences at least, to train on and held out
PAIRS, ANY_ORDER = "pairs of bytes", "any order of the words"
SENTENCE = re.compile(rf"[A-Z][a-z]+(?:,? [a-z']+){{{WORDS[0] - 1},{WORDS[1] - 1}}}(?=[.!?;:])")


def sentences(text):
    """The sentences of 3 to 8 plain words in a text, uint8 -> [words in lower case], each once."""
    found = {}
    for match in SENTENCE.finditer(re.sub(r"\s+", " ", bytes(text).decode("latin-1"))):
        words = match[0].replace(",", "").lower().split()
        if len(" ".join(words)) <= LONGEST and len(set(words)) > 2:
            found[" ".join(words)] = words
    return list(found.values())


def split_sentences(corpus):
    """Sentences to train on, and held-out ones that have the words of none of them."""
    train, held = sentences(corpus.train), sentences(corpus.val)
    seen = {tuple(sorted(words)) for words in train}
    return train, [words for words in held if tuple(sorted(words)) not in seen]


def scramble(several, rng):
    """Sentences -> "shuffled\\noriginal\\n" and zeros, and which of the T targets are asked for.

    uint8 (B, T + 1) and bool (B, T). No order is drawn that reads like the original.
    """
    texts = np.zeros((len(several), 2 * LONGEST + 2), np.uint8)
    asked = np.zeros((len(several), 2 * LONGEST + 1), bool)
    for row, words in enumerate(several):
        mixed = words
        while mixed == words:
            mixed = [words[i] for i in rng.permutation(len(words))]
        first, second = (" ".join(order).encode() + b"\n" for order in (mixed, words))
        end = len(first + second)
        texts[row, :end] = list(first + second)
        asked[row, len(first) - 1 : end - 1] = True
    return torch.from_numpy(texts), torch.from_numpy(asked)


def orders(words):
    """In how many different orders these words can stand."""
    repeats = (math.factorial(words.count(word)) for word in set(words))
    return math.factorial(len(words)) // math.prod(repeats)


@dataclass
class Task:
    """One text's sentences: those to train on, and the held-out ones as the test."""

    name: str
    train: list
    held: list

    def __post_init__(self):
        texts, asked = scramble(self.held, np.random.default_rng(1))
        self.texts, self.asked = texts, asked  # (B, T + 1) and (B, T)
        self.words = np.array([len(sentence) for sentence in self.held])

    def rows(self, scheme, seed, right):
        """What of the test is right: right (B, T) by byte, or (B,) the chance of each sentence."""
        named = dict(text=self.name, scheme=scheme, seed=seed, words=None)
        named |= dict(train_sentences=len(self.train), held_out=len(self.held))
        rows, exact = [], right
        if right.ndim == 2:
            asked = self.asked.numpy()
            share = float(right[asked].mean())
            rows.append(named | dict(metric="bytes right", value=share))
            exact = (right | ~asked).all(1)
        named["metric"] = "sentences right"
        rows.append(named | dict(value=float(exact.mean())))
        for n in np.unique(self.words):
            share = float(exact[self.words == n].mean())
            rows.append(named | dict(words=int(n), value=share))
        return rows


def task_of(corpus, name):
    """The Task of a corpus. ValueError if it has too few sentences."""
    train, held = split_sentences(corpus)
    held = held[:HELD_OUT]
    if len(train) < NEEDED[0] or len(held) < NEEDED[1]:
        raise ValueError(
            f"{corpus.name}: {len(train)} sentences of {WORDS[0]} to {WORDS[1]} words to train on "
            f"and {len(held)} held out are too few (needed: {NEEDED[0]} and {NEEDED[1]})"
        )
    return Task(name, train, held)


def most_frequent_next(task):
    """The test answered without reading: the byte that follows the byte before most often."""
    pairs = np.zeros((256, 256))
    texts, asked = scramble(task.train, np.random.default_rng(2))
    np.add.at(pairs, (texts[:, :-1][asked].numpy(), texts[:, 1:][asked].numpy()), 1)
    x, y = task.texts[:, :-1].numpy(), task.texts[:, 1:].numpy()
    return pairs.argmax(1)[x] == y


def answers_of(setup, task, scheme, seed):
    """Train a model on the sentences -> its answers to the test, each byte given the right ones
    before it: (B, T).
    """
    torch.manual_seed(seed)
    model, rng = TinyLM(scheme, **SIZE).to(setup.device), np.random.default_rng(seed)

    def loss_at(step):
        drawn = [task.train[i] for i in rng.integers(0, len(task.train), BATCH)]
        texts, asked = scramble(drawn, rng)
        logits = model(texts[:, :-1].to(setup.device))  # (B, T, 256)
        targets = texts[:, 1:][asked].to(setup.device).long()
        return F.cross_entropy(logits[asked.to(setup.device)], targets)

    steps = QUICK_STEPS if setup.quick else STEPS
    fit(model, steps, loss_at, progress=progress(f"unscramble, {task.name}, {scheme}, seed {seed}"))
    with torch.no_grad():
        parts = task.texts.to(setup.device).split(100)
        return torch.cat([model(part[:, :-1]).argmax(-1) for part in parts]).cpu()


def guess_rows(task, scheme, seed, answers):
    """What was made of the first three sentences, to be read."""
    rows = []
    for i in range(3):
        given = bytes(task.texts[i].tolist()).decode("latin-1").split("\n")[0]
        answer = bytes(answers[i][task.asked[i]].tolist()).decode("latin-1").strip()
        row = dict(text=task.name, scheme=scheme, seed=seed, metric="guess", words=None)
        rows.append(row | dict(value=f"{given} → {answer}"))
    return rows


def tasks(setup):
    """The setup's corpus, and Shakespeare's sentences where they are there without fetching."""
    yield task_of(setup.corpus, "corpus")
    if (
        SHAKESPEARE_PATH.exists()
        and not setup.quick
        and "shakespeare" not in setup.corpus.name.lower()
    ):
        yield task_of(load_corpus("shakespeare"), "Shakespeare")


def measure(setup):
    """The share of bytes and of sentences that are right, of every scheme and of guessing."""
    rows, length = [], 2 * LONGEST + 1
    for scheme in setup.own_schemes:
        check_scheme(Run(scheme=scheme, dtype="float32", **SIZE), length, setup.device)
    for task in tasks(setup):
        rows += task.rows(PAIRS, 0, most_frequent_next(task))
        for scheme in (*SCHEMES, *setup.own_schemes):
            for seed in setup.seeds:
                answers = answers_of(setup, task, scheme, seed)
                rows += task.rows(scheme, seed, (answers == task.texts[:, 1:]).numpy())
                if scheme == "rope" and seed == setup.seeds[0]:
                    rows += guess_rows(task, scheme, seed, answers)
        # any order but the shuffled one
        chance = np.array([1 / (orders(sentence) - 1) for sentence in task.held])
        rows += task.rows(ANY_ORDER, 0, chance)
    return rows


def rule(none, best_of_four, floor):
    """Partly if not even the best of the four is well above the floor. Else confirmed if none is
    near the floor, refuted if it is near the best, partly in between.
    """
    if best_of_four < 1.5 * floor:
        return "partly"
    if none <= 1.1 * floor:
        return "confirmed"
    return "refuted" if none >= 0.95 * best_of_four else "partly"


def judge(rows):
    rows = select(rows, text="corpus")
    right = {s: mean_of(rows, scheme=s, metric="bytes right") for s in ("none", PAIRS, *POSITIONED)}
    best = max(POSITIONED, key=right.get)
    exact = {
        name: mean_of(rows, scheme=name, metric="sentences right", words=None)
        for name in ("none", best, ANY_ORDER)
    }
    learned = right[best] >= 1.5 * right[PAIRS]
    return Verdict(
        "Words shuffled in, the sentence out: without an encoding this is not learned at all.",
        "Each byte guessed from the shuffled sentence and the right bytes before it: `none` gets "
        f"{right['none']:.0%} right, {best} as the best of the four {right[best]:.0%}, the "
        f"commonest byte after each {right[PAIRS]:.0%}. Whole sentences: {exact['none']:.1%} and "
        f"{exact[best]:.1%}; to put the words in any order would give {exact[ANY_ORDER]:.1%}."
        + ("" if learned else " So none of them learned it in this time."),
        rule(right["none"], right[best], right[PAIRS]),
    )


def percent(found):
    return mean_std_text([100 * value for value in found])


def show(rows):
    exact = select(rows, metric="sentences right")
    lengths = sorted(n for n in distinct(exact, "words") if n)
    names = distinct(exact, "scheme")
    table = []
    for text in distinct(rows, "text"):
        for name in names:
            named = dict(text=text, scheme=name)
            line = [text, name, percent(values(rows, metric="bytes right", **named))]
            line.append(percent(values(exact, words=None, **named)))
            table.append(line + [percent(values(exact, words=n, **named)) for n in lengths])
    header = ["sentences of", "scheme", "bytes right, %", "sentences right, %"]
    header += [f"of {n} words" for n in lengths]
    guesses = "; ".join(values(rows, metric="guess"))
    text = markdown_table(header, table).replace("---:", "---", 1) + (
        "\nRoPE's guesses on held-out sentences, each byte from the right ones before it: "
        f"{guesses}.\n"
    )
    return text, picture(select(exact, text="corpus"), lengths)


def picture(exact, lengths):
    lines = {}
    for name in distinct(exact, "scheme"):
        if name != PAIRS:
            shares = [values(exact, scheme=name, words=n) or [0] for n in lengths]
            lines[name] = (lengths, [100 * float(np.mean(share)) for share in shares])
    return Picture(
        lines,
        "Shuffled words in, the sentence out: held-out sentences put right",
        "words in the sentence",
        "sentences right, %",
    )
