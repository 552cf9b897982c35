"""One run from beginning to end: found, or trained from where it was interrupted, scored, saved."""

import contextlib
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from data.batches import text_batch
from lab import score
from lab.checkpoints import Saver, finished, save_failure, save_model, unfinished
from lab.command import complain, training_bar
from lab.machine import broadcast, out_of_memory, rank, ranks
from lab.provenance import signature
from lab.rows import measured
from lab.stats import measured_ppl
from lab.train import Diverged, train

# Fine-tuning: the held-out text is scored before these steps, and at the end.
WATCHED_STEPS = (0, 5, 10, 20, 50, 100, 200, 500, 1000)
WATCHED_WINDOWS = 64


@dataclass
class How:
    """How runs are carried out; nothing in it changes what becomes of them."""

    stamp: dict = field(default_factory=dict)  # provenance of the rows
    table: str = "train_compare"
    fields: dict = field(default_factory=dict)  # more of the rows: way and factor of a fine-tuning
    save_every: float = 30  # seconds
    grad_accum: int = 1
    compiled: bool = False
    force: bool = False  # train again what is already trained
    say: callable = print


def train_run(run, corpus, path, device, how, start=None):
    """The rows of the model at `path`: of an equal run found there, or trained and put there.

    start: weights to go on from. A run that diverges or does not fit in memory gives one row with
    a note, and no model; one that is there stays.
    """
    name, ask = f"{run.scheme}, seed {run.seed}", not how.force and not rank()
    rows, why = broadcast(finished(path, run) if ask else (None, ""))
    if why:
        how.say(f"notice: {why}")
    if rows:
        how.say(f"{name}: already trained, {path}")
        return rows
    state, why = broadcast(unfinished(path, run) if ask else (None, ""))
    if why:
        how.say(f"notice: {why}")
    if state:
        how.say(f"{name}: goes on from step {state['step']}")
    job = Job(run, corpus, device, how, state, watched=start is not None)
    trained, note = job.train(path, start)
    if rank():
        return []
    rows, note = job.evaluate(trained) if trained else ([], note)
    if note:
        resume = path.with_suffix(".resume")
        kept = f"; {resume} keeps the last good state" if resume.exists() else ""
        complain(f"{name}: {note}{kept}")
        rows = [job.row(protocol="span", n=run.train_len, metric="ppl", note=note)]
        save_failure(path, run, rows)
    else:
        save_model(path, run, trained.model, rows, job.signature)
    return [run.flat() | row for row in rows]


class Job:
    """One run in progress: its clock, what was watched on the way, and its rows at the end."""

    def __init__(self, run, corpus, device, how, state, watched):
        self.run, self.corpus, self.device, self.how, self.state = run, corpus, device, how, state
        self.signature = signature(run)  # before training: a file may be edited meanwhile
        self.watched = state["watched"] if state else {"step": [], "ppl": []}
        self.started = time.perf_counter() - (state["seconds"] if state else 0)
        self.watches = watched
        if watched:
            self.ends = score.fixed_ends(len(corpus.val), run.train_len, WATCHED_WINDOWS)

    def seconds(self):
        """Seconds of training so far, without those of scoring."""
        return time.perf_counter() - self.started

    def watch(self, done, trained):
        """A hook: score the held-out text under the fixed protocol after some of the steps."""
        if rank() or not (done in WATCHED_STEPS or done == self.run.steps):
            return
        since = time.perf_counter()
        n = self.run.train_len
        with reading(trained.model) as model:
            read = self.run.read_by(model)
            nats = score.fixed(read, self.corpus.val, n, self.ends, self.device)
        self.watched["step"].append(done)
        self.watched["ppl"].append(measured_ppl(nats)["value"])
        self.started += time.perf_counter() - since

    def train(self, path, start):
        """Train -> (Trained, ""), or (None, why there is no model)."""
        run, how, data = self.run, self.how, self.corpus.train

        def batch_at(step):
            return text_batch(data, run, step)

        def extra():
            return dict(watched=self.watched, seconds=self.seconds(), signature=self.signature)

        done = self.state["step"] if self.state else 0
        bar = training_bar(run, done)
        hooks = [self.watch] if self.watches else []
        hooks += [Progress(bar, run, done), Saver(path, how.save_every, extra)]
        try:
            with bar:
                trained = train(
                    run, batch_at, self.device, self.state, hooks, start,
                    how.grad_accum, how.compiled,
                )  # fmt: skip
        except Diverged as error:
            return None, str(error)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or ranks() > 1:  # other ranks would wait for this one
                raise
            return None, "out of memory; try a larger --grad-accum, or a smaller --batch-size"
        return trained, ""

    def row(self, **values):
        return measured(table=self.how.table, **values) | self.how.fields | self.how.stamp

    def evaluate(self, trained):
        """The rows of a trained model -> (rows, ""), or ([], note) if its last steps broke it."""
        run, seconds, L = self.run, self.seconds(), self.run.train_len
        length = score.span_length([L], score.SPAN_BYTES, len(self.corpus.val))
        with reading(trained.model) as model:
            nats = score.span(run.read_by(model), self.corpus.val, L, length, self.device)
        scored = measured_ppl(nats)
        if scored["value"] is None:
            told = "on the held-out text after the last step; try a lower --lr and --adam-lr"
            return [], f"{scored['note']} {told}"
        losses = trained.curve["loss"]
        last = np.array([losses[-max(1, len(losses) // 10) :]])
        training = measured_ppl(last) | dict(metric="train_ppl", low=None, high=None, count=None)
        rows = [self.row(protocol="training", n=L, **training)]
        rows.append(self.row(protocol="span", n=L, **scored))
        plain = run.new_model(scheme="none")
        parameters = sum(p.numel() for p in trained.model.parameters())
        numbers = dict(
            parameters=parameters,
            position_parameters=parameters - sum(p.numel() for p in plain.parameters()),
            seconds=round(seconds, 1),
            tokens_per_second=round(run.tokens / seconds),
        )
        rows += [self.row(metric=name, value=value) for name, value in numbers.items()]
        for step, loss in zip(trained.curve["step"], losses):
            rows.append(self.row(protocol="training", metric="loss", step=step, value=loss))
        for step, ppl in zip(self.watched["step"], self.watched["ppl"]):
            rows.append(self.row(protocol="fixed", n=L, metric="ppl", step=step, value=ppl))
        return rows, ""


@contextlib.contextmanager
def reading(model):
    """A model in training, as it is read: without dropout, and drawing nothing from training."""
    states = torch.get_rng_state()
    model.eval()
    try:
        yield model
    finally:
        model.train()
        torch.set_rng_state(states)


class Progress:
    """A hook that moves a progress bar and shows loss and tokens per second on it."""

    def __init__(self, bar, run, first):
        """first: how many steps were done before."""
        self.bar, self.run, self.first = bar, run, first
        self.started = time.perf_counter()

    def __call__(self, done, trained):
        if not done:
            return
        if trained.recorded:
            tokens = (done - self.first) * self.run.batch_size * self.run.train_len
            speed = tokens / (time.perf_counter() - self.started) / 1000
            told = f"loss {trained.curve['loss'][-1]:.3f}, {speed:.1f}k tokens/s"
            self.bar.set_postfix_str(told, refresh=False)
        self.bar.update()
