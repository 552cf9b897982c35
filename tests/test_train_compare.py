import csv
import ctypes
import inspect
import io
import json
import math
import re

import numpy as np
import pytest
import torch

import common
import train_compare
from common import HERE, code_hash, keep_freed_memory, pick_dtype
from conftest import CPU, SETTINGS, Bar, tree
from data.corpus import load_corpus
from tiny_lm import SCHEMES, TinyLM, load_model
from train_compare import batch, checkpoint_path, learning_rate, train

TINY = "--steps 6 --batch-size 2 --train-len 16 --dim 16 --n-layer 1 --n-head 2 --dtype fp32 --device cpu".split()


def test_batches_are_a_function_of_seed_and_step():
    data = load_corpus().train
    x, y = batch(data, 0, 7, 32, 256)
    assert x.shape == y.shape == (32, 256) and x.dtype == torch.uint8
    assert torch.equal(x[:, 1:], y[:, :-1])  # every position predicts its next byte
    rows = [bytes(row.tolist()) for row in x[:3]]
    assert all(row in bytes(data) for row in rows)
    again, _ = batch(data, 0, 7, 32, 256)
    assert torch.equal(x, again)
    assert not torch.equal(x, batch(data, 0, 8, 32, 256)[0]) and not torch.equal(x, batch(data, 1, 7, 32, 256)[0])
    shortest, _ = batch(np.arange(5, dtype=np.uint8), 0, 0, 100, 4)  # one place to start at
    assert torch.equal(shortest, torch.arange(4, dtype=torch.uint8).expand(100, 4))
    starts = batch(np.arange(6, dtype=np.uint8), 0, 0, 100, 4)[0][:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_schemes_see_the_same_batches_and_start_alike(monkeypatch):
    data, seen = np.arange(3000, dtype=np.int64).astype(np.uint8), {}
    real = train_compare.batch
    for scheme in SCHEMES:
        seen[scheme] = []
        monkeypatch.setattr(train_compare, "batch", lambda *args: seen[scheme].append(real(*args)) or seen[scheme][-1])
        train(SETTINGS | {"scheme": scheme}, data, CPU, torch.float32, Bar())
    for scheme in SCHEMES:
        assert len(seen[scheme]) == 12
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(seen["none"], seen[scheme]))


def test_learning_rate_schedule():
    rates = [learning_rate(step, 500) for step in range(500)]
    assert rates[0] == pytest.approx(1 / 50) and rates[49] == 1 and rates[200] == 1
    assert rates[350] == pytest.approx(1 - 0.95 / 2) and rates[499] == pytest.approx(0.05, abs=0.004)
    assert learning_rate(0, 1) == 1


def test_every_weight_has_one_optimizer():
    for scheme in SCHEMES:
        model = TinyLM(scheme, dim=16, n_layer=2, n_head=2)
        muon, adam = train_compare.optimizers(model, 0.02, 0.004)
        groups = [[id(p) for group in o.param_groups for p in group["params"]] for o in (muon, adam)]
        assert sorted(groups[0] + groups[1]) == sorted(id(p) for p in model.parameters())
        assert len(groups[0]) == 8  # qkv, out, up, down of two blocks
        assert isinstance(muon, torch.optim.Muon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_repeats_bit_for_bit_and_learns(dtype):
    data = np.tile(np.arange(20, dtype=np.uint8), 100)
    settings = SETTINGS | {"steps": 60}
    first, curve = train(settings, data, CPU, dtype, Bar())
    again, curve_again = train(settings, data, CPU, dtype, Bar())
    assert curve == curve_again
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values()))
    assert curve["step"] == [10, 20, 30, 40, 50, 60]
    assert curve["loss"][-1] < 2.5 < 5 < curve["loss"][0]  # ln 20 = 3.0 is what knowing the 20 bytes, not their order, would give
    assert all(p.dtype == torch.float32 for p in first.parameters())


def test_seeds_start_differently():
    zeros = np.zeros(1000, np.uint8)  # whatever the seed, the batches are the same
    first, second = (train(SETTINGS | {"seed": seed, "steps": 1}, zeros, CPU, torch.float32, Bar())[0] for seed in (0, 1))
    assert (first.embed.weight - second.embed.weight).abs().mean() > 0.1


def test_a_huge_training_loss_is_noted(cli, text, tmp_path):
    code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", "rope", "none", "--adam-lr", "1000")
    assert code == 0 and "| none | 1 | – | – |" in stdout
    assert all(row["val_ppl"] is None and "nats" in row["note"] for row in json.loads((tmp_path / "out" / "train_compare.json").read_text())["rows"])


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    common.write_file(path, "earlier")
    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(common.os, "fsync", full)
    with pytest.raises(OSError):
        common.write_file(path, "later")
    assert path.read_text() == "earlier" and tree(tmp_path) == ["result.json"]


def test_run_where_the_output_is_no_terminal_file(monkeypatch):
    for stream in (None, object()):  # nobody is listening; a notebook's stream
        monkeypatch.setattr(common.sys, "stdout", stream)
        common.run(lambda: None)


def test_bf16_training_follows_fp32():
    data = load_corpus().train[:50_000]
    settings = SETTINGS | {"steps": 40, "batch_size": 8, "train_len": 32}
    exact, low = (train(settings, data, CPU, dtype, Bar())[1]["loss"] for dtype in (torch.float32, torch.bfloat16))
    assert low == pytest.approx(exact, abs=0.05) and low != exact


def test_files_of_a_run(cli, text, tmp_path):
    out = tmp_path / "out"
    code, stdout, _ = cli(train_compare, *TINY, "--data", text, "--out", out, "--seeds", 0, 1)
    assert code == 0
    assert tree(out) == sorted([f"checkpoints/{s}-seed{n}.pt" for s in SCHEMES for n in (0, 1)]
                               + [f"train_compare.{kind}" for kind in ("csv", "json", "md", "png")] + ["train_compare_curves.csv"])
    curves = (out / "train_compare_curves.csv").read_text().splitlines()
    result = json.loads((out / "train_compare.json").read_text())
    assert [(r["scheme"], r["seed"]) for r in result["rows"]] == [(s, n) for s in SCHEMES for n in (0, 1)]
    assert result["corpus"]["sha256"] == load_corpus(text).sha256
    assert result["command"].startswith("python train_compare.py --steps 6") and result["versions"]["torch"] == torch.__version__
    assert curves == ["scheme,seed,step,loss"] + [f"{r['scheme']},{r['seed']},6,{r['curve']['loss'][0]}" for r in result["rows"]]
    assert result["code"]["train_compare.py"] == code_hash((HERE / "train_compare.py").read_bytes()) and "data/corpus.py" in result["code"]
    for row in result["rows"]:
        assert row["tokens"] == 6 * 2 * 16 and 1 < row["val_ppl"] < 300 and row["note"] == ""
        assert row["position_parameters"] == (16 * 16 * 16 if row["scheme"] == "learned" else 0)
        assert row["train_ppl"] == pytest.approx(math.exp(row["curve"]["loss"][-1]), rel=1e-4)
    assert (out / "train_compare.md").read_text() in stdout
    table = list(csv.DictReader(io.StringIO((out / "train_compare.csv").read_text())))
    assert [float(line["val_ppl"]) for line in table] == [row["val_ppl"] for row in result["rows"]]

    model, saved = load_model(out / "checkpoints" / "rope-seed1.pt")
    assert saved["settings"]["scheme"] == "rope" and saved["row"] == result["rows"][5]
    assert "position" not in " ".join(model.state_dict())


def test_what_is_trained_is_not_trained_again(cli, text, tmp_path, monkeypatch):
    out, trained = tmp_path / "out", []
    real = train_compare.train_and_score
    monkeypatch.setattr(train_compare, "train_and_score", lambda settings, *rest, **how: trained.append(settings["scheme"]) or real(settings, *rest, **how))
    call = lambda *more: cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", *more)[0]
    assert call("rope") == 0 and trained == ["rope"]
    before = json.loads((out / "train_compare.json").read_text())["rows"]
    assert call("rope", "none") == 0 and trained == ["rope", "none"]
    assert json.loads((out / "train_compare.json").read_text())["rows"][:1] == before
    assert call("rope", "none", "--force") == 0 and trained[2:] == ["rope", "none"]
    assert json.loads((out / "train_compare.json").read_text())["rows"][0]["val_ppl"] == before[0]["val_ppl"]
    assert call("rope", "--lr", "0.01") == 0 and trained[4:] == ["rope"]  # another setting, another model
    (out / "checkpoints" / "rope-seed0.pt").write_bytes(b"cut short")
    assert call("rope") == 0 and trained[5:] == ["rope"]
    text_before = inspect.getsource(train_compare.learning_rate)
    monkeypatch.setattr(train_compare.inspect, "getsource", lambda part: text_before + "# changed")
    assert call("rope") == 0 and trained[6:] == ["rope"]  # other code, another model


def test_ctrl_c_keeps_what_is_finished(cli, text, tmp_path, monkeypatch):
    out, real = tmp_path / "out", train_compare.train
    def interrupted(settings, *rest):
        if settings["scheme"] == "rope":
            raise KeyboardInterrupt
        return real(settings, *rest)
    monkeypatch.setattr(train_compare, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli(train_compare, *TINY, "--data", text, "--out", out)
    assert tree(out / "checkpoints") == ["learned-seed0.pt", "sin-seed0.pt"]
    assert [row["scheme"] for row in json.loads((out / "train_compare.json").read_text())["rows"]] == ["learned", "sin"]


def test_a_run_that_diverges_says_so_and_the_others_go_on(cli, text, tmp_path, monkeypatch):
    out, real = tmp_path / "out", train_compare.F.cross_entropy
    calls = []
    def poisoned(*args, **options):
        calls.append(1)
        return real(*args, **options) * (float("nan") if 3 < len(calls) <= 6 else 1)
    monkeypatch.setattr(train_compare.F, "cross_entropy", poisoned)
    code, stdout, stderr = cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "rope", "none")
    assert code == 0 and "rope, seed 0: loss nan at step 4 of 6 (rates 0.0168 and 0.0126); try a lower" in stderr
    assert tree(out / "checkpoints") == ["none-seed0.pt"]
    rows = json.loads((out / "train_compare.json").read_text())["rows"]
    assert rows[0]["val_ppl"] is None and rows[0]["note"].startswith("loss nan at step 4 of 6") and rows[1]["val_ppl"] > 1
    assert "| rope | 1 | – | – |" in stdout


def test_own_scheme(cli, text, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nfrom torch import nn\nclass Zero(nn.Module):\n    def __init__(self, dim, x=1):\n        super().__init__()\n"
                                      "        self.dim = dim\n    def forward(self, positions):\n        return torch.zeros(len(positions), self.dim)\n")
    scheme = f"{tmp_path / 'mine.py'}:Zero:x=3"
    code, _, _ = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", scheme, "none")
    rows = json.loads((tmp_path / "out" / "train_compare.json").read_text())["rows"]
    assert code == 0 and rows[0]["scheme"] == scheme
    assert rows[0]["val_ppl"] == rows[1]["val_ppl"]  # an encoding of zeros is no encoding
    path = checkpoint_path(tmp_path / "out", scheme, 0)
    before = path.stat().st_mtime_ns
    mine = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text('"""Its docstring."""\n' + mine + "# and a comment\n")
    _, stdout, _ = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", scheme, "none")
    assert stdout.count("already trained") == 2
    (tmp_path / "mine.py").write_text(mine.replace("zeros", "ones"))
    _, stdout, _ = cli(train_compare, *TINY, "--data", text, "--out", tmp_path / "out", "--schemes", scheme, "none")
    assert path.stat().st_mtime_ns != before and stdout.count("already trained") == 1  # an edited file is another model


@pytest.mark.parametrize("body, message", [
    ("raise KeyError('gone')", "KeyError: 'gone'"),
    ("raise RuntimeError", "RuntimeError"),
    ("assert False", "AssertionError"),
    ("return x[:, :-1]", "does not work in this network"),
    ("return self.out(self.qkv(x)[..., :16]).double()", "does not work in this network"),
    ("return self.out(self.qkv(x)[..., :16] + torch.zeros(16))", "does not work in this network (bfloat16): RuntimeError"),
    ("return self.out(self.qkv(x)[..., :16].mean(1, keepdim=True).expand(x.shape))", "sees what it is to predict"),
    ("y = self.qkv(x)[..., :16].exp(); z = self.out(y); y.add_(1); return z", "modified by an inplace operation"),
])
def test_own_schemes_that_cannot_work_are_told_before_training(cli, text, tmp_path, body, message):
    (tmp_path / "mine.py").write_text("import torch\nfrom torch import nn\nclass A(nn.Module):\n    def __init__(self, dim, n_head):\n        super().__init__()\n"
                                      "        self.qkv = nn.Linear(dim, 3 * dim, bias=False)\n        self.out = nn.Linear(dim, dim, bias=False)\n"
                                      f"    def forward(self, x, positions=None):\n        {body}\n")
    code, _, stderr = cli(train_compare, *TINY[:-4], "--dtype", "bf16", "--data", text, "--out", tmp_path / "out", "--schemes", f"{tmp_path / 'mine.py'}:A")
    assert code == 2 and message in stderr and stderr.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong, message", [
    ("--steps 0", "argument --steps: '0' is not a whole number from 1"),
    ("--steps -3", "'-3' is not a whole number"),
    ("--steps many", "'many' is not a whole number"),
    ("--batch-size 99999999999999", "is not a whole number from 1 to 2147483647"),
    ("--lr 0", "'0' is not a number above 0"),
    ("--lr nan", "'nan' is not a number above 0"),
    ("--seeds 0 0", "--seeds: 0 is given 2 times"),
    ("--schemes rope rope", "--schemes: rope is given 2 times"),
    ("--schemes rope ropes", "unknown scheme 'ropes': use learned, sin, rope, alibi, none"),
    ("--schemes rope:base=x", "base must be a"),
    ("--schemes learned:max_len=8", "position 15 has no row: max_len is 8"),
    ("--dim 15", "dim=15 does not divide into n_head=2 heads"),
    ("--dim 6", "head width 3: must be even"),
    ("--train-len 100000", "too few for windows of 100,000"),
    ("--data nowhere", "--data nowhere: no such file or folder"),
    ("--dtype fp8", "invalid choice: 'fp8'"),
    ("--device abacus", "--device abacus: there is no such device here"),
    ("--device meta", "--device meta: there is no such device here"),
    ("--lr 1e30", "'1e30' is not a number above 0 and at most 1000"),
    ("--quic", "unrecognized arguments: --quic"),
    ("--device hpu", "--device hpu: there is no such device here"),
    ("--schemes rope:base=10,base=20", "base is given twice"),
    ("--schemes rope:", "scheme 'rope:': no option ''"),
    ("--data ~nosuchuser/x", "--data ~nosuchuser/x: cannot be read"),
    ("--data " + "x" * 300, "cannot be read (File name too long)"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("--dim 2000000", "weights take"),
    ("--grad-accum 3", "--batch-size 2 cannot be split in 3 parts"),
])
def test_wrong_arguments_get_one_line_and_write_nothing(cli, text, tmp_path, wrong, message):
    out = tmp_path / "out"
    code, stdout, stderr = cli(train_compare, *TINY, "--data", text, "--out", out, *wrong.split())
    assert code == 2 and not out.exists() and stdout == ""
    assert message in stderr and stderr.count("\n") == 1 and stderr.startswith("train_compare.py: ")


def test_out_that_cannot_be_a_folder(cli, text, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        code, _, stderr = cli(train_compare, *TINY, "--data", text, "--out", out)
        assert code == 2 and f"--out {out}: cannot be made" in stderr and stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none(cli, tmp_path):
    code, _, stderr = cli(train_compare, "--device", "cuda", "--out", tmp_path / "out")
    assert code == 2 and "--device cuda: there is no such device here" in stderr and not (tmp_path / "out").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_on_cuda(cli, text, tmp_path):
    tiny = TINY[:-4]
    assert cli(train_compare, *tiny, "--data", text, "--out", tmp_path / "out", "--device", "cuda", "--dtype", "bf16")[0] == 0
    model, _ = load_model(tmp_path / "out" / "checkpoints" / "alibi-seed0.pt")
    assert next(model.parameters()).device.type == "cpu"


def test_dtype_auto(monkeypatch):
    for units, expected in (({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32), ({}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
        assert pick_dtype("auto", CPU) == expected
    assert pick_dtype("auto", torch.device("mps")) == torch.float32
    assert pick_dtype("bf16", CPU) == torch.bfloat16


@pytest.mark.parametrize("missing", [AttributeError, OSError, TypeError])
def test_another_c_library_is_left_alone(monkeypatch, missing):
    def absent(name):
        raise missing
    monkeypatch.setattr(ctypes, "CDLL", absent)
    keep_freed_memory()


def test_freed_memory_is_kept_while_a_driver_runs(monkeypatch):
    calls = []
    class Library:
        def mallopt(self, parameter, value):
            calls.append((parameter, value))
            return 1
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    common.run(lambda: calls.append("main"))
    assert calls == [(-1, 2**31 - 1), (-3, 32 * 2**20), "main"]  # trim threshold, mmap threshold, as malloc.h numbers them


def test_the_table_shows_the_seconds_of_the_rows(tmp_path):
    row = dict(scheme="rope", seed=0, train_ppl=3.0, val_ppl=3.1, parameters=10, position_parameters=0, tokens_per_second=77, note="",
               curve={"step": [], "loss": []})
    table = train_compare.write_results(tmp_path, [row | {"seconds": 100.4}, row | {"seed": 1, "seconds": 300.4}], {})
    assert "| rope | 2 | 3.00 ± 0.00 | 3.10 ± 0.00 | 0 | 10 | 200 | 77 |" in table


# Trained in another way

def test_mixed_lengths_take_turns_with_as_many_bytes(monkeypatch):
    seen, real = [], train_compare.batch
    monkeypatch.setattr(train_compare, "batch", lambda *args: seen.append(real(*args)) or seen[-1])
    data = np.tile(np.arange(20, dtype=np.uint8), 100)
    train(SETTINGS | dict(train_lens=[4, 8, 16], steps=5), data, CPU, torch.float32, Bar())
    assert [tuple(x.shape) for x, _ in seen] == [(8, 4), (4, 8), (2, 16), (8, 4), (4, 8)]


def test_random_positions_are_an_ordered_subset_and_reach_the_model(monkeypatch):
    positions = train_compare.random_positions(0, 3, 16, 40)
    assert positions.shape == (16,) and (positions.diff() > 0).all() and 0 <= positions[0] and positions[-1] < 40
    assert torch.equal(positions, train_compare.random_positions(0, 3, 16, 40))
    assert not torch.equal(positions, train_compare.random_positions(0, 4, 16, 40))
    assert torch.equal(train_compare.random_positions(5, 1, 16, 16), torch.arange(16))
    with pytest.raises(ValueError, match="17 bytes do not fit in 16 random positions"):
        train_compare.random_positions(0, 0, 17, 16)
    seen, real = [], TinyLM.forward
    monkeypatch.setattr(TinyLM, "forward", lambda self, ids, positions=None: seen.append(positions) or real(self, ids, positions))
    settings = SETTINGS | dict(random_positions=40, steps=3)
    model, _ = train(settings, np.tile(np.arange(20, dtype=np.uint8), 100), CPU, torch.float32, Bar())
    assert [torch.equal(p, train_compare.random_positions(0, step, 16, 40)) for step, p in enumerate(seen)] == [True] * 3
    ids = torch.arange(9)[None]
    read = train_compare.at_its_positions(model, settings)
    assert torch.equal(read(ids), model(ids, train_compare.random_positions(0, 0, 9, 40)))
    assert train_compare.at_its_positions(model, SETTINGS) is model


def test_copies_repeat_a_string_in_half_of_the_windows():
    window = torch.full((5, 65), 255, dtype=torch.uint8)
    train_compare.copies(window, 0, 0)
    assert (window[3:] == 255).all()
    for row in window[:3].tolist():
        periods = [p for p in range(16, 49) if row[p:] == row[:-p]]
        assert periods and all(97 <= byte < 123 for byte in row)
    again = torch.full((5, 65), 255, dtype=torch.uint8)
    train_compare.copies(again, 0, 0)
    assert torch.equal(window, again)
    tiny = torch.zeros(2, 5, dtype=torch.uint8)
    train_compare.copies(tiny, 0, 1)
    assert tiny[0].min() >= 97


def test_what_is_special_is_in_the_settings_and_retrains(cli, text, tmp_path):
    out = tmp_path / "out"
    common = (*TINY, "--data", text, "--out", out, "--schemes", "sin")
    for flags in ((), ("--random-positions", 64), ("--window", 8), ("--copies",), ("--train-len", 8, 16)):
        code, stdout, _ = cli(train_compare, *common, *flags)
        assert code == 0 and "already trained" not in stdout
        assert "already trained" in cli(train_compare, *common, *flags)[1]
        row, = json.loads((out / "train_compare.json").read_text())["rows"]
        assert row["tokens"] == 6 * 2 * 16 and row["val_ppl"] > 1


def test_the_hash_is_of_what_the_code_does():
    plain = b"def f(x):\n    return x + 1\n"
    assert common.code_hash(plain) == common.code_hash(b'def f(x):\r\n    """Doc."""\r\n    return x + 1  # comment\r\n') == common.code_hash(b"    " + plain.replace(b"\n ", b"\n     "))
    assert common.code_hash(plain) != common.code_hash(plain.replace(b"1", b"2"))


# Fine-tuning

@pytest.fixture
def parent(cli, text, tmp_path):
    out = tmp_path / "out"
    assert cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "learned", "sin", "rope", "alibi")[0] == 0
    return out


def test_finetuning_goes_on_from_the_checkpoint(cli, parent, tmp_path):
    tuned = tmp_path / "tuned"
    code, stdout, _ = cli(train_compare, "--finetune-from", "rope", "alibi", "learned", "sin", "--from", parent, "--out", tuned, "--scaling", "linear",
                          "yarn", "--train-len", 64, "--steps", 5, "--dtype", "fp32", "--device", "cpu")
    assert code == 0
    names = ["alibi", "learned", "rope-scaling=linear,factor=4,trained_len=16", "rope-scaling=yarn,factor=4,trained_len=16", "sin-factor=4"]
    assert tree(tuned) == sorted([f"checkpoints/{name}-seed0.pt" for name in names] + ["finetune.csv", "finetune.json", "finetune.md"])
    model, saved = load_model(tuned / "checkpoints" / (names[3] + "-seed0.pt"))
    settings = saved["settings"]
    assert (settings["train_len"], settings["batch_size"], settings["max_len"], settings["steps"]) == (64, 1, 256, 5)  # 2·16/64 rows, at least 1
    old, before = load_model(parent / "checkpoints" / "rope-seed0.pt")
    assert settings["finetuned_from"] == before["settings"] | {"weights": train_compare.weights_hash(old.state_dict())}
    watched = saved["row"]["curve"]["watched"]
    assert watched["step"] == [0, 5] and model.blocks[0].attention.scaling["scaling"] == "yarn"
    # before the first step it is the parent, read with that scaling
    from data.corpus import load_corpus
    import score
    val = load_corpus(settings["data"]).val
    start = load_model(parent / "checkpoints" / "rope-seed0.pt")[0]
    scaled = TinyLM(settings["scheme"], 16, 1, 2)
    scaled.load_state_dict(start.state_dict())
    ends = score.fixed_ends(len(val), 64, train_compare.WATCHED_WINDOWS)
    assert watched["ppl"][0] == score.scores(score.fixed(scaled, val, 64, ends))["ppl"] != watched["ppl"][1]
    table = list(csv.DictReader(io.StringIO((tuned / "finetune.csv").read_text())))
    assert "steps to ALiBi's start" in (tuned / "finetune.md").read_text()
    assert len(table) == 2 * 5 and table[1]["step"] == "5" and table[1]["tokens"] == str(5 * 64)
    assert "already trained" in cli(train_compare, "--finetune-from", "alibi", "--from", parent, "--out", tuned, "--train-len", 64, "--steps", 5,
                                    "--dtype", "fp32", "--device", "cpu")[1]


@pytest.mark.parametrize("wrong, message", [
    ("--scaling yarn", "--scaling goes with --finetune-from"),
    ("--from results", "--from goes with --finetune-from"),
    ("--finetune-from rope --dim 32", "--dim does not go with --finetune-from"),
    ("--finetune-from rope --schemes rope", "--schemes does not go with"),
    ("--finetune-from none", "no checkpoint .*none-seed0.pt; train first: python train_compare.py --schemes none --seeds 0"),
    ("--finetune-from rope --seeds 4", "no checkpoint .*rope-seed4.pt"),
    ("--finetune-from rope rope", "--finetune-from: rope is given 2 times"),
    ("--finetune-from rope --scaling cubic", "invalid choice: 'cubic'"),
    ("--finetune-from alibi --scaling yarn --train-len 64", "--scaling yarn: none of these schemes takes it"),
    ("--finetune-from rope64 --scaling none yarn --train-len 64", "--scaling yarn: --train-len 64 must be above the length trained at so far, 64"),
    ("--random-positions 15", "--random-positions 15 is below the training length 16"),
    ("--train-len 16 16", "--train-len: 16 is given 2 times"),
    ("--window -1", "'-1' is not a whole number from 0"),
    ("--finetune-from rope --train-len 32", "--train-len 32: fine-tuning is watched under the fixed protocol, which needs at least 64"),
    ("--schemes learned:max_len=32 --random-positions 64", "position 63 has no row: max_len is 32"),
])
def test_wrong_ways_to_train_get_one_line(cli, text, parent, tmp_path, wrong, message):
    out = tmp_path / "new"
    flags = ["--train-len", 16, "--data", text] if "--finetune" not in wrong else ["--from", parent]
    if "rope64" in wrong:
        assert cli(train_compare, *TINY, "--data", text, "--out", parent, "--schemes", "rope", "--train-len", 64)[0] == 0
        wrong = wrong.replace("rope64", "rope")
    code, stdout, stderr = cli(train_compare, "--device", "cpu", "--out", out, *flags, *wrong.split())
    assert code == 2 and stdout == "" and stderr.count("\n") == 1 and re.search(message, stderr), stderr
    assert not out.exists()


def test_finetuning_does_not_write_over_what_it_starts_from(cli, parent):
    code, _, stderr = cli(train_compare, "--finetune-from", "rope", "--from", parent, "--out", parent, "--train-len", 64)
    assert code == 2 and "holds the checkpoints to start from" in stderr


def test_what_is_not_said_is_as_in_the_checkpoint(cli, text, tmp_path):
    """Fine-tuning keeps window, random positions, copies and the trained length that options start from; a flag changes them."""
    out, tune = tmp_path / "out", ("--steps", 2, "--train-len", 64, "--dtype", "fp32", "--device", "cpu", "--from")
    special = ("--window", 8, "--random-positions", 300, "--copies")
    schemes = ("learned:beyond=interpolate", "rope:scaling=yarn,factor=4")
    assert cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", *schemes, *special)[0] == 0
    assert cli(train_compare, "--finetune-from", *schemes, *tune, out, "--out", tmp_path / "same")[0] == 0
    paths = sorted((tmp_path / "same" / "checkpoints").glob("*.pt"))
    for path in paths:
        model, saved = load_model(path)
        settings = saved["settings"]
        assert (settings["window"], settings["random_positions"], settings["copies"], settings["trained_len"]) == (8, 300, True, 16)
        assert model.blocks[0].attention.attend.keywords == dict(window=8) and settings["max_len"] == 300
    assert len(paths) == 2
    assert cli(train_compare, "--finetune-from", *schemes, *tune, out, "--out", tmp_path / "other", "--window", 0)[0] == 0
    assert load_model(tmp_path / "other" / "checkpoints" / paths[0].name)[1]["settings"]["window"] == 0
    code, _, stderr = cli(train_compare, *TINY, "--data", text, "--out", out, "--schemes", "alibi")
    assert code == 0
    code, _, stderr = cli(train_compare, "--finetune-from", "alibi", schemes[1], *tune, out, "--out", tmp_path / "mix")
    assert code == 2 and "was trained with window 8, alibi with 0" in stderr


def test_other_text_and_other_weights_are_noticed(cli, text, parent, tmp_path):
    tune = ("--finetune-from", "alibi", "--from", parent, "--out", tmp_path / "tuned", "--steps", 2, "--train-len", 64, "--dtype", "fp32", "--device", "cpu")
    assert "notice" not in cli(train_compare, *tune)[1]
    assert "already trained" in cli(train_compare, *tune)[1]
    saved = torch.load(parent / "checkpoints" / "alibi-seed0.pt", weights_only=True)
    saved["model"]["norm.weight"] *= 2
    torch.save(saved, parent / "checkpoints" / "alibi-seed0.pt")
    assert "already trained" not in cli(train_compare, *tune)[1]
    (tmp_path / "else.txt").write_bytes(b"something else entirely " * 300)
    assert "notice: the checkpoints were trained on other text" in cli(train_compare, *tune, "--data", tmp_path / "else.txt")[1]


def test_copies_and_windows_reach_the_training(monkeypatch):
    seen, real = [], train_compare.batch
    monkeypatch.setattr(train_compare, "batch", lambda *args: seen.append(args) or real(*args))
    model, _ = train(SETTINGS | dict(copies=True, window=5, steps=2), np.arange(200, dtype=np.uint8), CPU, torch.float32, Bar())
    assert [args[1:] for args in seen] == [(0, step, 2, 16, True) for step in (0, 1)]
    assert model.blocks[0].attention.attend.keywords == dict(window=5)
    x, y = batch(np.zeros(200, np.uint8), 0, 1, 4, 32, True)
    assert (x[:2] >= 97).all() and (x[2:] == 0).all() and not torch.equal(x[:2], batch(np.zeros(200, np.uint8), 0, 2, 4, 32, True)[0][:2])


def test_the_fine_tuning_table_by_hand(tmp_path):
    row = lambda scheme, seed, ppl: dict(scheme=scheme, seed=seed, steps=20, tokens=2000, note="", curve=dict(watched=dict(step=[0, 5, 20], ppl=ppl)))
    text = train_compare.write_finetune(tmp_path, [row("rope", 0, [9.0, 3.0, 2.0]), row("rope", 1, [9.0, 4.0, 2.0]), row("sin", 0, [9.0, 8.0, 7.0]),
                                                   row("alibi", 0, [3.2, 3.0, 3.0])], {}, 64)
    assert "| rope | 2 | 9.00 ± 0.00 | 3.50 ± 0.71 | 2.00 ± 0.00 | 20 |" in text and "| sin | 1 | 9.00 | 8.00 | 7.00 | > 20 |" in text
    assert "| alibi | 1 | 3.20 | 3.00 | 3.00 | 0 |" in text and "5 (0k)" in text and "20 (2k)" in text
