"""Break position on purpose, and compare what happens with what the textbooks say.

    python break_position.py                # all experiments, on the checkpoints of train_compare.py; theta alone
                                            # trains five models of 2 to 3 minutes
    python break_position.py order swap     # some of them
    python break_position.py --quick        # on those of train_compare.py --quick, one to two minutes

    order        without positions attention cannot tell 我打你 from 你打我
    no-encoding  a model without positions cannot learn order; and: the causal mask tells it where it is
    unscramble   words in the wrong order in, the sentence out: trained and tested for each scheme (trains 10 small models a seed)
    bag          neither mask nor positions: the next byte from the bag of the bytes before it (trains 2 models a seed)
    theta        RoPE with base 10 … 1,000,000 in place of 10,000 (trains 5 models a seed and keeps them in --out/theta)
    long         trained at 256, read at 4096: where it breaks, and what each scaling saves
    swap         a model read at other positions than it was trained with, or with another scheme

Each prints the expectation, what was measured and the verdict: confirmed, partly or refuted, by a rule that stands in the
code. Writes break_<name>.json and .md into --out, .png where a picture helps, and break.md with a line for each.
"""
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import score
from common import Parser, distinct, only_writer, pick_device, provenance, run, whole, writable_folder, write_file, write_json
from context_test import attention_by_distance
from data.corpus import SHAKESPEARE_PATH, load_corpus
from extrapolation_test import LONGER, find_checkpoints, read_as, trained_as
from pos_alibi import ALiBiAttention
from pos_learned import LearnedPositionalEmbedding
from pos_rope import RoPEAttention
from pos_sin import SinusoidalPositionalEncoding
from report import buckets, markdown_table, plot_lines, spread, usable_cell
from tiny_lm import SCHEMES, PlainAttention, TinyLM, load_model, size_of
from train_compare import checkpoint_path, find_or_train, learning_rate, optimizers, training_hash, ways

POSITIONED = ("learned", "sin", "rope", "alibi")


def arguments():
    parser = Parser(__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{' '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--sentences", nargs=2, action="append", default=[], metavar=("A", "B"),
                        help="order: two sentences more, of the same bytes in another order; may be given again")
    parser.add_argument("--seeds", nargs="+", type=whole(0), default=[0], metavar="N", help="(default: 0)")
    parser.add_argument("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    parser.add_argument("--out", default="results", help="folder with checkpoints/, and for the results (default: results)")
    parser.add_argument("--quick", action="store_true", help="all in small, into results/quick/; other flags still count")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(out="results/quick")
    args = parser.parse_args()
    args.experiments = args.experiments or list(EXPERIMENTS)
    return parser, args


def average(values):
    """Mean of perplexities; infinite where one is so large that it is not given."""
    return math.inf if None in values else float(np.mean(values))


# order

PAIRS = [("我打你", "你打我"), ("the dog bit the man", "the man bit the dog"), ("only he said he loved her", "he said he loved only her")]


def permutation(a, b):
    """Where each byte of b stands in a: b[i] = a[permutation[i]]. ValueError if b is not a reordering of a."""
    if not a or a == b:
        raise ValueError(f"--sentences: '{bytes(a).decode(errors='replace')}' twice; give two sentences that differ in order")
    places = {}
    for i, byte in enumerate(a):
        places.setdefault(byte, []).append(i)
    if sorted(a) != sorted(b):
        raise ValueError(f"--sentences: '{bytes(b).decode(errors='replace')}' is not '{bytes(a).decode(errors='replace')}' in another order")
    return torch.tensor([places[byte].pop(0) for byte in b])


def unmasked(q, k, v, is_causal):
    """Attention between all tokens, in place of the causal one."""
    return F.scaled_dot_product_attention(q, k, v)


def bidirectional(scheme, dim=64, n_head=4):
    """One attention layer over byte embeddings without a mask, random weights -> ids (T,) -> outputs (T, dim)."""
    torch.manual_seed(0)
    embed = nn.Embedding(256, dim)
    attention = {"rope": lambda: RoPEAttention(dim, n_head, causal=False), "alibi": lambda: ALiBiAttention(dim, n_head, causal=False)}
    layer = attention.get(scheme, lambda: PlainAttention(dim, n_head, attend=unmasked))()
    rows = {"learned": lambda: LearnedPositionalEmbedding(dim), "sin": lambda: SinusoidalPositionalEncoding(dim)}.get(scheme, lambda: None)()
    if scheme == "learned":
        nn.init.normal_(rows.weight, 0, 1)  # as large as the tokens, as training makes them
    def read(ids):
        x = embed(ids)
        if rows is not None:
            x = x + rows(torch.arange(len(ids)))
        return layer(x[None])[0]
    return read


def order(args, models, corpus, trained):
    rows = []
    with torch.no_grad():
        for first, second in PAIRS + [tuple(pair) for pair in args.sentences]:
            a, b = (torch.tensor(list(text.encode())) for text in (first, second))
            moved = permutation(a.tolist(), b.tolist())
            row = dict(sentences=f"{first} / {second}")
            for scheme in ("none",) + POSITIONED:
                read = bidirectional(scheme)
                x, y = read(a), read(b)
                row[f"{scheme}: outputs"] = float((y - x[moved]).abs().max() / x.abs().max())
                row[f"{scheme}: pooled"] = float((y.mean(0) - x.mean(0)).norm() / x.mean(0).norm())
            for layers in (1, 2):  # with a causal mask: the last token is the same full stop in both
                torch.manual_seed(0)
                model = TinyLM("none", 64, layers, 4)
                for weight in model.parameters():
                    weight.normal_(0, 0.2)
                x, y = (model(torch.cat((ids, torch.tensor([46])))[None])[0, -1] for ids in (a, b))
                row[f"causal, {layers} layers: last token"] = float((y - x).norm() / x.norm())
            rows.append(row)
    blind = max(max(row["none: outputs"], row["none: pooled"], row["causal, 1 layers: last token"]) for row in rows)
    told = min(min(row[f"{scheme}: pooled"] for scheme in POSITIONED) for row in rows)
    depth = min(row["causal, 2 layers: last token"] for row in rows)
    header = ["relative difference"] + ["no mask, none"] + [f"no mask, {s}" for s in POSITIONED] + ["causal, none, 1 layer", "causal, none, 2 layers"]
    table = [[row["sentences"], f"{row['none: pooled']:.1e}", *(f"{row[f'{s}: pooled']:.2g}" for s in POSITIONED),
              f"{row['causal, 1 layers: last token']:.1e}", f"{row['causal, 2 layers: last token']:.2g}"] for row in rows]
    return dict(
        expectation="Attention without positions is blind to order: 我打你 and 你打我 read the same.",
        measured=f"Without mask and positions the outputs are the permuted outputs, and the mean over tokens is the same, to rounding "
                 f"(at most {blind:.0e} of its size); with any of the four the mean differs by at least {told:.1%}. A causal mask alone: one "
                 f"layer's last token still cannot tell; the second layer's can (by at least {depth:.1%}), since the tokens before it "
                 "have seen different beginnings.",
        verdict="confirmed" if blind < 1e-5 and told > 1e-3 and depth > 1e-3 else "refuted",
        table=markdown_table(header, table), rows=rows)


# no-encoding

def hidden_states(model, ids):
    """The residual stream before the first block and after each: ids (B, T) -> [n_layer + 1] of (B, T, C)."""
    states = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, inputs: states.append(inputs[0]))]
    hooks += [block.register_forward_hook(lambda block, inputs, output: states.append(output)) for block in model.blocks]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def probe(train, test):
    """How well position can be read from hidden states (B, T, C) by a linear map: ridge regression of t on h_t, fitted on
    `train` -> R² on `test`: 1 is perfect, 0 is the mean position whatever the state."""
    def flat(states):
        x = states.double().flatten(0, 1)
        return torch.cat((x, torch.ones(len(x), 1, dtype=torch.double)), 1), torch.arange(states.shape[1]).double().repeat(len(states))
    x, y = flat(train)
    scale = x[:, :-1].std(0).mean()
    ridge = 1e-3 * len(x) * scale ** 2 * torch.eye(x.shape[1], dtype=torch.double)
    ridge[-1, -1] = 0
    weight = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
    x, y = flat(test)
    return float(1 - (x @ weight - y).square().sum() / (y - y.mean()).square().sum())


def count_model_ppl(train, val, bytes_back):
    """Perplexity on val of byte counts of train, given the `bytes_back` (0 or 1) bytes before; one added to every count."""
    before = (lambda text: text[:-1].astype(np.int64)) if bytes_back else (lambda text: np.zeros(len(text) - 1, np.int64))
    counts = np.ones((256, 256))
    np.add.at(counts, (before(train), train[1:]), 1)
    chance = counts / counts.sum(1, keepdims=True)
    return float(np.exp(-np.log(chance[before(val), val[1:]]).mean()))


def no_encoding(args, models, corpus, trained):
    L, rows = trained["train_len"], []
    windows = [np.array(corpus.val[start:start + 64 * L].reshape(64, L)) for start in (0, 64 * L)]
    texts = [torch.from_numpy(window).to(args.device) for window in windows]
    span = score.span_length([L], score.SPAN_BYTES, len(corpus.val))
    torch.manual_seed(0)
    untrained = TinyLM("none", **size_of(trained)).to(args.device)
    with torch.no_grad():
        for block in untrained.blocks:  # they start at zero, and every block as the identity
            block.attention.out.weight.normal_(0, trained["dim"] ** -0.5)
            block.down.weight.normal_(0, (4 * trained["dim"]) ** -0.5)
    for name, seed, model in [("none, untrained", 0, untrained)] + [(settings["scheme"], settings["seed"], model) for model, settings in models]:
        r2 = [probe(a.cpu(), b.cpu()) for a, b in zip(*(hidden_states(model, ids) for ids in texts))]
        ppl = score.perplexity(score.span(model, corpus.val, L, span, args.device)) if name in SCHEMES else None
        rows.append(dict(scheme=name, seed=seed, ppl=ppl, r2=[round(value, 4) for value in r2]))
    counts = {back: count_model_ppl(np.asarray(corpus.train), np.asarray(corpus.val), back) for back in (0, 1)}
    mean = lambda name: average([row["ppl"] for row in rows if row["scheme"] == name])
    r2 = lambda name, layer: float(np.mean([row["r2"][layer] for row in rows if row["scheme"] == name]))
    names = list(dict.fromkeys(row["scheme"] for row in rows))
    table = [[name, spread([row["ppl"] for row in rows if row["scheme"] == name])]
             + [f"{r2(name, layer):.2f}" for layer in range(trained["n_layer"] + 1)] for name in names]
    best_four = min(mean(s) for s in names if s in POSITIONED)
    deepest = max(range(trained["n_layer"] + 1), key=lambda layer: r2("none", layer))
    none = mean("none")
    verdict = "refuted" if none <= 1.1 * best_four else "confirmed" if none >= 0.9 * counts[1] else "partly"
    return dict(
        expectation="Without an encoding the loss stays high, because the model cannot tell order.",
        measured=f"Perplexity {none:.2f}, against {best_four:.2f} of the best of the four after the same training, {counts[1]:.1f} of "
                 f"counting which byte follows which, and {counts[0]:.1f} of counting bytes. From its hidden states a linear map reads the position with "
                 f"R² {r2('none', deepest):.2f} after block {deepest} (0: not at all, 1: exactly; {r2('none', 0):.2f} before the first block): the causal mask is all that can have told it.",
        verdict=verdict, rows=rows, counts=counts,
        picture=lambda path: plot_lines(path, {name: (list(range(trained["n_layer"] + 1)), [r2(name, layer) for layer in range(trained["n_layer"] + 1)])
                                               for name in names}, "How well a linear map reads the position from the hidden states",
                                        "after block (0: the input)", "R² (1: exactly, 0: not at all)"),
        table=markdown_table(["scheme", f"perplexity at {L}"] + ["R² at the input"] + [f"after block {i + 1}" for i in range(trained["n_layer"])], table))


# unscramble

LONGEST, WORDS = 48, (3, 8)  # bytes of a sentence, and how many words


def sentences(text):
    """The sentences of 3 to 8 plain words in a text, uint8 -> lists of words in lower case, each sentence once."""
    found = {}
    for match in re.finditer(rf"[A-Z][a-z]+(?:,? [a-z']+){{{WORDS[0] - 1},{WORDS[1] - 1}}}(?=[.!?;:])", re.sub(r"\s+", " ", bytes(text).decode("latin-1"))):
        words = match[0].replace(",", "").lower().split()
        if len(" ".join(words)) <= LONGEST and len(set(words)) > 2:
            found[" ".join(words)] = words
    return list(found.values())


def split_sentences(corpus):
    """Sentences to train on, and held-out ones: none of these has the words of a training sentence, in whatever order."""
    train, held = sentences(corpus.train), sentences(corpus.val)
    seen = {tuple(sorted(words)) for words in train}
    return train, [words for words in held if tuple(sorted(words)) not in seen]


def scramble(several, rng):
    """Sentences -> bytes "shuffled\\noriginal\\n" and zeros, uint8 (B, T + 1), and which of the T targets are of the original.

    No order is drawn that reads like the original.
    """
    texts = np.zeros((len(several), 2 * LONGEST + 2), np.uint8)
    answer = np.zeros((len(several), 2 * LONGEST + 1), bool)
    for row, words in enumerate(several):
        mixed = words
        while mixed == words:
            mixed = [words[i] for i in rng.permutation(len(words))]
        first, second = (" ".join(order).encode() + b"\n" for order in (mixed, words))
        texts[row, :len(first + second)] = list(first + second)
        answer[row, len(first) - 1:len(first + second) - 1] = True
    return torch.from_numpy(texts), torch.from_numpy(answer)


def fit(model, steps, loss_at, lr=0.02, adam_lr=0.015, what=""):
    """Train a model by the recipe of train_compare.py in float32: loss_at(step) -> loss."""
    both = optimizers(model, lr, adam_lr)
    for step in tqdm(range(steps), desc=what, unit="step", mininterval=0.1 if sys.stderr.isatty() else 30):
        loss_at(step).backward()
        for optimizer, peak in zip(both, (lr, adam_lr)):
            optimizer.param_groups[0]["lr"] = peak * learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def unscramble(args, models, corpus, trained):
    steps, batch, rows, texts, examples = (30 if args.quick else 300), 64, [], {"corpus": corpus}, []
    if SHAKESPEARE_PATH.exists() and not args.quick and "shakespeare" not in corpus.name.lower():
        texts["Shakespeare"] = load_corpus("shakespeare")
    for name, text in texts.items():
        train, held = split_sentences(text)
        held = held[:1000]
        if len(train) < 200 or len(held) < 20:
            raise ValueError(f"{text.name}: {len(train)} sentences of 3 to 8 words to train on and {len(held)} held out are too few "
                             "(needed: 200 and 20)")
        inputs, answer = scramble(held, np.random.default_rng(1))
        inputs, answer = inputs.to(args.device), answer.to(args.device)
        words = np.array([len(sentence) for sentence in held])
        # what one gets without reading: the most frequent byte after the byte before
        pairs, known = np.zeros((256, 256)), scramble(train, np.random.default_rng(2))
        np.add.at(pairs, (known[0][:, :-1][known[1]].numpy(), known[0][:, 1:][known[1]].numpy()), 1)
        x, y, asked = inputs[:, :-1].cpu().numpy(), inputs[:, 1:].cpu().numpy(), answer.cpu().numpy()
        guess = [("pairs of bytes", 0, pairs.argmax(1)[x] == y)]
        for scheme in SCHEMES:
            for seed in args.seeds:
                torch.manual_seed(seed)
                model = TinyLM(scheme, 64, 2, 4, max_len=2 * LONGEST + 2).to(args.device)
                rng = np.random.default_rng(seed)

                def loss_at(step):
                    mixed, asked = scramble([train[i] for i in rng.integers(0, len(train), batch)], rng)
                    logits = model(mixed[:, :-1].to(args.device))
                    return F.cross_entropy(logits[asked.to(args.device)], mixed[:, 1:][asked].to(args.device).long())
                fit(model, steps, loss_at, what=f"unscramble, {name}, {scheme}, seed {seed}")
                with torch.no_grad():
                    answers = torch.cat([model(part[:, :-1]).argmax(-1) for part in inputs.split(100)])
                guess.append((scheme, seed, (answers == inputs[:, 1:]).cpu().numpy()))
                if scheme == "rope" and seed == args.seeds[0]:
                    reads = lambda row, marks: bytes(row[marks].tolist()).decode("latin-1").strip()
                    examples += [f"{bytes(x[i]).decode('latin-1').split(chr(10))[0]} → {reads(answers[i], answer[i])}" for i in range(3)]
        for scheme, seed, right in guess:
            exact = (right | ~asked).all(1)
            rows.append(dict(text=name, scheme=scheme, seed=seed, bytes_right=float(right[asked].mean()), exact=float(exact.mean()),
                             exact_by_words={int(n): float(exact[words == n].mean()) for n in np.unique(words)},
                             train_sentences=len(train), held_out=len(held)))
        chance = np.array([1 / (orders(sentence) - 1) for sentence in held])  # any order but the shuffled one
        rows.append(dict(text=name, scheme="any order of the words", seed=0, bytes_right=None, exact=float(chance.mean()),
                         exact_by_words={int(n): float(chance[words == n].mean()) for n in np.unique(words)}))
    of = lambda text, scheme, key: [row[key] for row in rows if (row["text"], row["scheme"]) == (text, scheme)]
    lengths = sorted({n for row in rows for n in row["exact_by_words"]})
    percent = lambda values: "–" if None in values or not values else spread([100 * value for value in values])
    table = [[text, scheme, percent(of(text, scheme, "bytes_right")), percent(of(text, scheme, "exact"))]
             + [percent([by[n] for by in of(text, scheme, "exact_by_words") if n in by]) for n in lengths]
             for text in texts for scheme in dict.fromkeys(row["scheme"] for row in rows)]
    mean = lambda scheme, key: float(np.mean([row[key] for row in rows if (row["text"], row["scheme"]) == ("corpus", scheme)]))
    none, floor = mean("none", "bytes_right"), mean("pairs of bytes", "bytes_right")
    best = max(POSITIONED, key=lambda scheme: mean(scheme, "bytes_right"))
    learned = mean(best, "bytes_right") >= 1.5 * floor
    return dict(
        expectation="Words shuffled in, the sentence out: without an encoding this is not learned at all.",
        measured=f"Each byte guessed from the shuffled sentence and the right bytes before it: `none` gets {none:.0%} right, {best} as the best "
                 f"of the four {mean(best, 'bytes_right'):.0%}, the commonest byte after each {floor:.0%}. Whole sentences: {mean('none', 'exact'):.1%} and "
                 f"{mean(best, 'exact'):.1%}; to put the words in any order would give {mean('any order of the words', 'exact'):.1%}."
                 + ("" if learned else " So none of them learned it in this time."),
        verdict="partly" if not learned else "confirmed" if none <= 1.1 * floor else "refuted" if none >= 0.95 * mean(best, "bytes_right") else "partly",
        table=markdown_table(["sentences of", "scheme", "bytes right, %", "sentences right, %"] + [f"of {n} words" for n in lengths], table).replace("---:", "---", 1)
              + "\nRoPE's guesses on held-out sentences, each byte from the right ones before it: " + "; ".join(examples) + ".\n", rows=rows,
        picture=lambda path: plot_lines(path, {scheme: (lengths, [100 * float(np.mean([by[n] for by in of("corpus", scheme, "exact_by_words") if n in by] or [0]))
                                                                  for n in lengths]) for scheme in (*SCHEMES, "any order of the words")},
                                        "Shuffled words in, the sentence out: held-out sentences put right", "words in the sentence", "sentences right, %"))


def orders(words):
    """In how many different orders these words can stand."""
    return math.factorial(len(words)) // math.prod(math.factorial(words.count(word)) for word in set(words))


# bag

BAGS = (1, 4, 16, 64)  # how many of the bytes before


def bags_and_next(data, width, count, rng):
    """`count` times `width` bytes of the data and the byte after them: uint8 (count, width), int64 (count,)."""
    starts = rng.integers(0, len(data) - width, count)
    cut = torch.from_numpy(np.asarray(data[starts[:, None] + np.arange(width + 1)]))
    return cut[:, :-1], cut[:, -1].long()


def read_bag(model, ids, average):
    """The next byte from the bag of some bytes, whatever their order: ids (N, w) -> logits (N, 256).

    The network of `none`, with attention between all bytes in place of the causal one, read at the mean over them. average: the
    mean is taken first already, of their embeddings.
    """
    x = model.embed(ids.long())  # (N, w, C)
    if average:
        x = x.mean(1, keepdim=True)
    for block in model.blocks:
        x = block(x, None)
    return model.head(model.norm(x.mean(1)))


def bag(args, models, corpus, trained):
    steps, batch, rows, L = (20 if args.quick else 600), 1024, [], trained["train_len"]
    for seed in args.seeds:
        for name, averaged in (("bag: attention without mask", False), ("bag: mean of the embeddings", True)):
            torch.manual_seed(seed)
            model = TinyLM("none", 64, 2, 4).to(args.device)
            for block in model.blocks:
                block.attention.attend = unmasked

            def loss_at(step):
                ids, target = bags_and_next(corpus.train, BAGS[step % len(BAGS)], batch, np.random.default_rng((seed, step)))
                return F.cross_entropy(read_bag(model, ids.to(args.device), averaged), target.to(args.device))
            fit(model, steps, loss_at, what=f"{name}, seed {seed}")
            for width in BAGS:
                ids, target = bags_and_next(corpus.val, width, 512 if args.quick else 8192, np.random.default_rng(0))
                with torch.no_grad():
                    nats = torch.cat([F.cross_entropy(read_bag(model, some.to(args.device), averaged), right.to(args.device), reduction="none")
                                      for some, right in zip(ids.split(512), target.split(512))])
                rows.append(dict(model=name, width=width, seed=seed, ppl=score.perplexity(nats)))
    span = score.span_length([L], score.SPAN_BYTES // (8 if args.quick else 1), len(corpus.val))
    for model, settings in models:
        rows.append(dict(model=settings["scheme"], width=L, seed=settings["seed"],
                         ppl=score.perplexity(score.span(model, corpus.val, L, span, args.device))))
    for back, name in enumerate(("counts of bytes", "counts of pairs of bytes")):
        rows.append(dict(model=name, width=back, seed=0, ppl=count_model_ppl(np.asarray(corpus.train), np.asarray(corpus.val), back)))
    of = lambda name, width: [row["ppl"] for row in rows if (row["model"], row["width"]) == (name, width)]
    table = [[name, width, spread(of(name, width)), f"{math.log2(average(of(name, width))):.2f}"]
             for name, width in dict.fromkeys((row["model"], row["width"]) for row in rows)]
    attention = {width: average(of("bag: attention without mask", width)) for width in BAGS}
    pairs, = of("counts of pairs of bytes", 1)
    none, best = average(of("none", L)), min(attention, key=attention.get)
    return dict(
        expectation="Neither mask nor positions: the model sees a bag of bytes, and more of them do not help to guess the next.",
        measured=f"From the bag of the last 1, 4, 16 and 64 bytes attention reaches perplexity {', '.join(f'{attention[w]:.1f}' for w in BAGS)}; "
                 f"counting pairs has {pairs:.1f}, counting bytes {of('counts of bytes', 0)[0]:.1f}, `none` with its causal mask {none:.1f}. "
                 f"The best bag is that of {best}.",
        verdict="refuted" if attention[best] < 0.95 * min(attention[1], pairs) else "confirmed" if best == 1 else "partly",
        table=markdown_table(["model", "bytes it sees", "perplexity", "bits per byte"], table), rows=rows,
        picture=lambda path: plot_lines(path, {name: (list(BAGS), [average(of(name, width)) for width in BAGS]) for name in dict.fromkeys(
            row["model"] for row in rows if row["model"].startswith("bag"))} | {"counts of pairs of bytes": (list(BAGS), [pairs] * len(BAGS)), "none": (list(BAGS), [none] * len(BAGS))},
                                        "The next byte from a bag of the bytes before it", "bytes in the bag", "perplexity per byte", log=True))


# theta

BASES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)


def full_turns(base, head_dim, length):
    """How many of the D/2 pairs make a whole turn within `length` tokens: 2π·base^(2i/D) ≤ length."""
    return sum(2 * math.pi * base ** (2 * i / head_dim) <= length for i in range(head_dim // 2))


def theta(args, models, corpus, trained):
    L, rows = trained["train_len"], []
    if L < score.K:
        raise ValueError(f"the training length {L} is below {score.K}, which the fixed protocol needs")
    now = training_hash(RoPEAttention), corpus.sha256
    lengths, folder = [L * times for times in LONGER["times"]], Path(args.out) / "theta"
    stretch = score.span_length(lengths, LONGER["span_bytes"] if not args.quick else lengths[-1], len(corpus.val))
    ends = score.fixed_ends(len(corpus.val), lengths[-1], 8 if args.quick else LONGER["windows"])
    ids = torch.from_numpy(np.array(corpus.val[ends[:8, None] + np.arange(-L, 0)])).to(args.device)  # (8, L)
    head_dim = trained["dim"] // trained["n_head"]
    ropes = [(model, settings) for model, settings in models if settings["scheme"] == "rope"]
    writable_folder(folder)
    with only_writer(writable_folder(folder / "checkpoints")):
        for base in BASES:
            for model, settings in ropes:
                if (settings["code"], settings["sha256"]) != now:
                    raise ValueError(f"rope, seed {settings['seed']}, was trained by other code or on other text than the other bases would be; "
                                     "first: python train_compare.py --schemes rope with the same flags")
                if base != 10_000:
                    settings = settings | dict(scheme=f"rope:base={base}")
                    path = checkpoint_path(folder, settings["scheme"], settings["seed"])
                    row = find_or_train(path, settings, corpus, args.device, getattr(torch, settings["dtype"]))
                    if row["val_ppl"] is None:
                        raise ValueError(f"base {base}, seed {settings['seed']}: {row['note']}")
                    model = load_model(path)[0].to(args.device)
                near = np.cumsum(attention_by_distance(model, ids))
                row = dict(base=base, seed=settings["seed"], full_turns=full_turns(base, head_dim, L),
                           near={2 ** i: float(near[2 ** i - 1]) for i in range(L.bit_length())}, fixed={}, span={})
                for n in lengths:
                    row["fixed"][n] = score.perplexity(score.fixed(model, corpus.val, n, ends, args.device))
                    row["span"][n] = score.perplexity(score.span(model, corpus.val, n, stretch, args.device))
                rows.append(row)
    of = lambda base, key, n: [row[key][n] for row in rows if row["base"] == base]
    mean = lambda base, key, n: average(of(base, key, n))
    table = [[f"{base:,}", f"{full_turns(base, head_dim, L)} of {head_dim // 2}", spread(of(base, "near", 32))] + [spread(of(base, "fixed", n)) for n in lengths]
             + [usable_cell({n: mean(base, "fixed", n) for n in lengths}, L)] + [spread(of(base, "span", n)) for n in lengths] for base in BASES]
    near, usual, far = BASES[0], 10_000, BASES[-1]
    claims = [mean(near, "near", 32) > 1.25 * mean(usual, "near", 32), mean(near, "fixed", L) > 1.05 * mean(usual, "fixed", L),
              mean(far, "fixed", L) > 1.05 * mean(usual, "fixed", L)]
    longest = lengths[-1]
    return dict(
        expectation="Base 10 makes RoPE see only neighbours, base 1,000,000 makes near and far hard to tell apart: both are worse than 10,000.",
        measured=f"At {L}, perplexity with base 10, 10,000 and 1,000,000 is {mean(near, 'fixed', L):.2f}, {mean(usual, 'fixed', L):.2f} and {mean(far, 'fixed', L):.2f}; the last 32 tokens "
                 f"get {mean(near, 'near', 32):.0%}, {mean(usual, 'near', 32):.0%} and {mean(far, 'near', 32):.0%} of the attention. At {longest:,} it is {mean(near, 'fixed', longest):.1f}, "
                 f"{mean(usual, 'fixed', longest):.1f} and {mean(far, 'fixed', longest):.1f}: with base 10 all {head_dim // 2} pairs make a whole turn within {L} tokens, so that no "
                 f"angle is new further out; with 10,000 {full_turns(usual, head_dim, L)} do, with 1,000,000 {full_turns(far, head_dim, L)}.",
        verdict="confirmed" if all(claims) else "partly" if any(claims) else "refuted",
        table=markdown_table(["base", f"pairs with a whole turn in {L}", "attention to the last 32"] + [f"fixed {n}" for n in lengths] + ["usable length"]
                             + [f"span {n}" for n in lengths], table), rows=rows,
        picture=lambda path: plot_lines(path, {f"base {base:,}": (lengths, [mean(base, "fixed", n) for n in lengths]) for base in BASES},
                                        f"RoPE trained at {L} with another base: same targets, more context (fixed protocol)",
                                        "evaluation length n, bytes", "perplexity per byte", mark=L, log=True))


# long

def first_break(nats, L, level):
    """The first position past L from which the mean of 32 losses is over 1.1 times the level; None: nowhere."""
    for start in range(L, len(nats) - 31):
        if nats[start:start + 32].mean() > 1.1 * level:
            return start
    return None


def long(args, models, corpus, trained):
    L, rows, curves = trained["train_len"], [], {}
    n = 16 * L
    length = score.span_length([n], score.SPAN_BYTES if not args.quick else 16 * n, len(corpus.val))
    for model, settings in models:
        if settings["scheme"] != "rope":
            continue
        for name, options in ways(settings, ["none", "linear", "ntk", "dynamic", "yarn", "llama3"]).items():
            nats = score.span(read_as(model, settings, options(n), 0), corpus.val, n, length, args.device).mean(0)
            if not name:  # the model as it is comes first
                level = nats[L // 2:L].mean()
            rows.append(dict(way=name or "none", seed=settings["seed"], ppl=score.perplexity(nats), first=score.perplexity(nats[:L]),
                             last=score.perplexity(nats[-L:]), breaks_at=first_break(nats, L, level)))
            curves.setdefault(name or "none", []).append(nats)
    of = lambda way, key: [row[key] for row in rows if row["way"] == way]
    ways_ = list(curves)
    where = lambda way: ", ".join("nowhere" if at is None else f"{at:,}" for at in of(way, "breaks_at"))
    table = [[way, spread(of(way, "first")), spread(of(way, "last")), spread(of(way, "ppl")), where(way)] for way in ways_]
    broke = [at for at in of("none", "breaks_at") if at is not None]
    ratio = {way: average(of(way, "last")) / average(of("none", "first")) for way in ways_}
    best = min((way for way in ways_ if way != "none"), key=ratio.get)
    return dict(
        expectation=f"RoPE without scaling breaks soon past its training length; a scaling extends it to {n:,} without training.",
        measured=f"Without scaling the loss leaves its level at position {', '.join(f'{at:,}' for at in broke) or 'none'}, and the last {L} of {n:,} bytes have a "
                 f"perplexity {ratio['none']:.1f} times that of the first {L}. The best scaling, {best}, leaves a factor of {ratio[best]:.1f}.",
        verdict="confirmed" if broke and ratio["none"] > 1.5 and ratio[best] < 1.1 else "partly" if broke and ratio["none"] > 1.5 else "refuted",
        table=markdown_table(["scaling", f"perplexity of the first {L}", f"of the last {L}", f"of all {n:,}", f"over 1.1 × the loss of none at {L // 2} … {L - 1} from"], table), rows=rows,
        picture=lambda path: plot_lines(path, {way if way != "none" else "no scaling": buckets(np.mean(curve, axis=0), 64) for way, curve in curves.items()},
                                        f"RoPE trained at {L}, read at {n:,} (scalings: factor {n // L}): loss by position", "position in the window, bytes",
                                        "loss, nats per byte", mark=L))


# swap

def ppl_at(model, data, L, length, positions, device):
    """Perplexity under span at other positions; None where the scheme has none of them, as a learned table past its end."""
    try:
        return score.perplexity(score.span(lambda ids: model(ids, positions(L, device)), data, L, length, device))
    except ValueError:
        return None


def swap(args, models, corpus, trained):
    L, rows = trained["train_len"], []
    length = score.span_length([L], score.SPAN_BYTES // 2 if not args.quick else 64 * L, len(corpus.val))
    count = lambda T, device: torch.arange(T, device=device)
    where = {"its own": count} | {f"+ {shift}": (lambda shift: lambda T, device: count(T, device) + shift)(shift) for shift in (1, 10, 100, 1000)} | {
        "reversed": lambda T, device: count(T, device).flip(0), "all equal": lambda T, device: 0 * count(T, device)}
    for model, settings in models:
        ppl = {name: ppl_at(model, corpus.val, L, length, positions, args.device) for name, positions in where.items()}
        for scheme in SCHEMES:
            if scheme != settings["scheme"]:
                torch.manual_seed(0)
                other = TinyLM(scheme, **size_of(settings))
                other.load_state_dict(model.state_dict(), strict=False)  # the shared weights; a learned table stays untrained
                ppl[f"read as {scheme}"] = score.perplexity(score.span(other.to(args.device).eval(), corpus.val, L, length, args.device))
        rows.append(dict(scheme=settings["scheme"], seed=settings["seed"], ppl=ppl))
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    of = lambda scheme, name: [row["ppl"].get(name) for row in rows if row["scheme"] == scheme]
    columns = list(where) + [f"read as {scheme}" for scheme in SCHEMES]
    table = [[scheme] + ["–" if of(scheme, name)[0] is None else spread(of(scheme, name)) for name in columns] for scheme in schemes]
    moved = {s: max(abs(math.log(average(of(s, f"+ {shift}")) / average(of(s, "its own")))) for shift in (1, 10, 100, 1000)
                    if None not in of(s, f"+ {shift}")) for s in schemes}
    still = [s for s in schemes if moved[s] < 0.01]
    absolute = [s for s in ("learned", "sin") if s in schemes]
    relative = [s for s in ("rope", "alibi", "none") if s in schemes]
    return dict(
        expectation="Relative schemes (RoPE, ALiBi) do not notice when all positions are shifted; absolute ones (learned, sinusoidal) do.",
        measured="Shifted by up to 1000 (learned: as far as its table reaches), perplexity moves by a factor of at most "
                 + ", ".join(f"{math.exp(moved[s]):.{3 if moved[s] < 0.05 else 1}f} ({s})" for s in schemes) + ".",
        verdict="confirmed" if set(still) == set(relative) else "refuted" if set(absolute) <= set(still) else "partly",
        table=markdown_table(["trained with; perplexity at positions"] + columns, table), rows=rows,
        picture=lambda path: plot_lines(path, {scheme: list(zip(*((shift, average(of(scheme, f"+ {shift}")) / average(of(scheme, "its own")))
                                                                  for shift in (1, 10, 100, 1000) if None not in of(scheme, f"+ {shift}")))) for scheme in schemes},
                                        "The same text at positions that begin later", "all positions shifted by", "perplexity over that at its own positions", log=True))


EXPERIMENTS = {"order": order, "no-encoding": no_encoding, "unscramble": unscramble, "bag": bag, "theta": theta, "long": long, "swap": swap}
WITHOUT_MODELS, ONLY_ROPE = {"order", "unscramble"}, {"theta", "long"}  # the others read the checkpoints of all schemes


def trained_models(args, schemes=None):
    """The checkpoints of train_compare.py -> (models on the device, corpus, settings of the first)."""
    models = find_checkpoints([args.out], schemes or list(SCHEMES), args.seeds)
    for model, settings in models:
        if trained_as(settings):
            raise ValueError(f"{settings['scheme']} in {args.out} was {trained_as(settings)}; the experiments are about the plain training")
        model.to(args.device)
    trained = models[0][1]
    corpus = load_corpus(trained["data"])
    needed = 128 * trained["train_len"] + 1
    if len(corpus.val) < needed:
        raise ValueError(f"{corpus.name}: {len(corpus.val):,} held-out bytes are too few for the experiments (needed: {needed:,})")
    return models, corpus, trained


def overview(out):
    """All experiments that have left their results in this folder, a line each."""
    lines = []
    for name in EXPERIMENTS:
        path = out / f"break_{name}.json"
        try:
            r = json.loads(path.read_text("utf-8"))
            lines.append([name, r["expectation"], r["measured"], f"**{r['verdict']}**"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError):
            print(f"notice: {path} is not a result of this experiment, and is left out of break.md", file=sys.stderr)
    return markdown_table(["experiment", "expectation", "measured", "verdict"], lines).replace("---:", "---")


def main():
    parser, args = arguments()
    try:
        distinct("EXPERIMENT", args.experiments)
        distinct("--seeds", args.seeds)
        for name in args.experiments:
            if name not in EXPERIMENTS:
                raise ValueError(f"unknown experiment '{name}': use {', '.join(EXPERIMENTS)}")
        for pair in args.sentences:
            permutation(*(text.encode() for text in pair))
        args.device = pick_device(args.device)
        needing = set(args.experiments) - WITHOUT_MODELS
        if needing:
            models, corpus, trained = trained_models(args, ["rope"] if needing <= ONLY_ROPE else None)
        else:  # on the text of the models that are there, if any
            found = list((Path(args.out) / "checkpoints").glob("*-seed*.pt"))
            models, corpus, trained = [], load_corpus(load_model(found[0])[1]["settings"]["data"] if found else "numpy"), None
        lock = only_writer(writable_folder(args.out))
    except ValueError as error:
        parser.error(str(error))
    with lock:
        failed = run_all(args, models, corpus, trained)
    if failed:
        sys.exit(1)


def run_all(args, models, corpus, trained):
    """The wanted experiments, one after another -> whether one was not possible."""
    out, failed, about = Path(args.out), False, provenance(corpus, args.device, torch.float32)  # of the code that runs
    for name in args.experiments:
        started = time.perf_counter()
        try:
            result = EXPERIMENTS[name](args, models, corpus, trained)
        except ValueError as error:  # the other experiments go on
            print(f"\n{name} was not possible: {error}", file=sys.stderr)
            failed = True
            continue
        text = (f"*Expectation:* {result['expectation']}\n\n*Measured:* {result['measured']}\n\n*Verdict:* **{result['verdict']}**\n\n"
                + result["table"])
        print(f"\n{name} ({time.perf_counter() - started:.0f} s)\n\n{text}")
        write_json(out / f"break_{name}.json", about | {
            key: result[key] for key in ("expectation", "measured", "verdict", "rows")} | {"seconds": round(time.perf_counter() - started)})
        write_file(out / f"break_{name}.md", text)
        if "picture" in result:
            result["picture"](out / f"break_{name}.png")
        write_file(out / "break.md", overview(out))
    print(f"wrote break_*.json, .md and .png, and break.md with all there are, into {out}")
    return failed


if __name__ == "__main__":
    run(main)
