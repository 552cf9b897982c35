"""RoPE past its training length: five ways to change its inverse frequencies f_i = base^(−2i/D).

Past the trained length L the slow pairs reach angles that training never showed. Scaling by
s = wanted length / L brings them back; nothing else of RoPE changes.

    linear    f_i / s: position interpolation (Chen et al. 2023, arXiv:2306.15595)
    ntk       base·s^(D/(D−2)) for base: the fastest pair as it was, the slowest f/s
              ("NTK-aware", bloc97 2023)
    dynamic   ntk with s·n/L − s + 1 for s, n the current length: unchanged up to L (emozilla 2023)
    yarn      pairs with over beta_fast turns in L keep f, under beta_slow turns get f/s, a ramp
              over i between them; cos and sin × 0.1·ln s + 1 (Peng et al. 2023, arXiv:2309.00071)
    llama3    pairs with over high_freq_factor turns in L keep f, under low_freq_factor turns get
              f/s, a ramp over the number of turns between them (Llama 3.1, arXiv:2407.21783)

Each is a function of its own; `ScaledRoPEAttention` is pos_rope.RoPEAttention with one of them.
To use them elsewhere copy this file beside pos_rope.py; it needs torch alone.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pos_rope import RoPEAttention, rope_frequencies

SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")


def linear(frequencies, factor):
    """f_i / s: (D/2,) -> (D/2,)."""
    return frequencies / factor


def ntk(head_dim, base, factor):
    """The frequencies of base·s^(D/(D−2)): (D/2,)."""
    return rope_frequencies(head_dim, base * factor ** (head_dim / (head_dim - 2)))


@dataclass(frozen=True)
class dynamic:  # a function with its numbers, so that a layer that has it can be pickled
    """A function of the positions (…, T) so far -> ntk's frequencies for their length, (…, D/2).

    The length n is each sequence's largest position + 1, so that no sequence of a batch moves
    another. On cached keys the layer rotates all of them anew, which equals one full pass of a
    single layer. With more layers no cached pass can equal the full one: the hidden states of
    earlier tokens were computed at a shorter length.
    """

    head_dim: int
    base: float
    factor: float
    trained_len: int

    def __call__(self, positions):
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        if not positions.numel():
            return rope_frequencies(self.head_dim, self.base).to(positions.device, exact)
        longest = positions.amax(-1, keepdim=True) + 1  # (…, 1)
        longest = longest.clamp(min=self.trained_len).to(exact)
        s = self.factor * longest / self.trained_len - self.factor + 1
        pair = torch.arange(0, self.head_dim, 2, dtype=exact, device=positions.device)  # 2i
        exponent = self.head_dim / (self.head_dim - 2)
        return (self.base * s**exponent) ** (-pair / self.head_dim)  # (…, D/2)


def yarn(frequencies, base, factor, trained_len, beta_fast=32.0, beta_slow=1.0):
    """YaRN's blend of f and f/s over the pairs: (D/2,) -> (D/2,). See yarn_amplitude as well.

    Pair i makes r turns in L at i(r) = D·ln(L/(2π·r)) / (2·ln base). The ramp runs from
    ⌊i(beta_fast)⌋ to ⌈i(beta_slow)⌉, held within 0 … D − 1.
    """
    half = len(frequencies)

    def pair_with(turns):
        return half * math.log(trained_len / (2 * math.pi * turns)) / math.log(base)

    low = max(math.floor(pair_with(beta_fast)), 0)
    high = min(math.ceil(pair_with(beta_slow)), 2 * half - 1)
    pair = torch.arange(half, dtype=torch.float64, device=frequencies.device)  # i
    ramp = ((pair - low) / (high - low or 0.001)).clamp(0, 1)  # 0: keep, 1: divide
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def yarn_amplitude(factor):
    """YaRN's factor on cos and sin, 0.1·ln s + 1."""
    return 0.1 * math.log(factor) + 1


def llama3(frequencies, factor, trained_len, low_freq_factor=1.0, high_freq_factor=4.0):
    """Llama 3's blend of f and f/s by the number of turns in L: (D/2,) -> (D/2,)."""
    turns = trained_len * frequencies / (2 * math.pi)  # (D/2,)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * keep + frequencies / factor * (1 - keep)


class ScaledRoPEAttention(RoPEAttention):
    """RoPEAttention with one of the scalings, all of it from numbers and names.

    scaling      none (default), linear, ntk, dynamic, yarn or llama3
    factor       s ≥ 1, wanted over trained length; every scaling needs it
    trained_len  L; dynamic, yarn and llama3 need it
    beta_fast, beta_slow, attention_factor (yarn: 32, 1, 0.1·ln s + 1), low_freq_factor,
    high_freq_factor (llama3: 1, 4)
    Everything else is that of RoPEAttention. ValueError: an unknown scaling, an option of another
    scaling, a value that is missing, impossible or contradicts another.
    """

    LONGER = SCALINGS[1:]

    @staticmethod
    def longer(way, n, L):
        """The options that make a model trained at L readable at n."""
        return dict(scaling=way, factor=n / L, trained_len=L)

    def __init__(self, dim, n_head, base=10000.0, interleaved=True, causal=True,
                 attend=F.scaled_dot_product_attention, scaling="none", factor=None,
                 trained_len=None, beta_fast=None, beta_slow=None, attention_factor=None,
                 low_freq_factor=None, high_freq_factor=None):  # fmt: skip
        super().__init__(dim, n_head, base, interleaved, causal, attend)
        options = dict(
            beta_fast=beta_fast, beta_slow=beta_slow, attention_factor=attention_factor,
            low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor,
        )  # fmt: skip
        options = {key: value for key, value in options.items() if value is not None}
        self.scaling, self.factor, self.trained_len = scaling, factor, trained_len
        self.frequencies, self.amplitude = scaled_frequencies(
            self.head_dim, base, scaling, factor, trained_len, **options
        )


def scaled_frequencies(head_dim, base, scaling, factor=None, trained_len=None, **options):
    """What RoPEAttention is handed for a scaling by name -> (frequencies, amplitude)."""
    plain = rope_frequencies(head_dim, base)
    _check(head_dim, base, scaling, factor, trained_len, options)
    if scaling == "none":
        return plain, 1.0
    if scaling == "linear":
        return linear(plain, factor), 1.0
    if scaling == "ntk":
        return ntk(head_dim, base, factor), 1.0
    if scaling == "dynamic":
        return dynamic(head_dim, base, factor, trained_len), 1.0
    if scaling == "llama3":
        return llama3(plain, factor, trained_len, **options), 1.0
    amplitude = options.pop("attention_factor", yarn_amplitude(factor))
    return yarn(plain, base, factor, trained_len, **options), amplitude


# What each scaling takes besides factor and trained_len, with its defaults.
OPTIONS = {
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _check(head_dim, base, scaling, factor, trained_len, options):
    """ValueError for options that cannot work, naming the value and what would be right."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling}: must be one of {', '.join(SCALINGS)}")
    known = OPTIONS.get(scaling, {})
    for key in options:
        if key not in known:
            has = ", ".join(known) or "none"
            raise ValueError(f"scaling={scaling} has no option {key}; it has {has}")
    if scaling == "none":
        if factor is not None:
            raise ValueError(
                f"factor={factor:g} without a scaling; give scaling=linear, ntk, dynamic, yarn or "
                "llama3 as well"
            )
        return
    is_number = isinstance(factor, (int, float))
    if not is_number or not 1 <= factor < float("inf"):
        raise ValueError(
            f"scaling={scaling}: factor={factor} must be a number of at least 1, wanted over "
            "trained length"
        )
    needs_length = scaling in ("dynamic", "yarn", "llama3")
    if (trained_len is None and needs_length) or not _is_length(trained_len):
        raise ValueError(
            f"scaling={scaling}: trained_len={trained_len} must be a whole number of at least 1"
        )
    if scaling in ("ntk", "dynamic") and head_dim == 2:
        raise ValueError(
            f"scaling={scaling}: head width 2 has one pair, and the fastest pair is never scaled; "
            "must be at least 4"
        )
    if scaling == "yarn" and base <= 1:
        raise ValueError(f"scaling=yarn: base={base} must be above 1")
    _check_bands(scaling, known | options)


def _is_length(value):
    return value is None or (1 <= value < float("inf") and value == int(value))


def _check_bands(scaling, options):
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        if low in options and not 0 < options[low] < options[high] < float("inf"):
            raise ValueError(
                f"scaling={scaling}: {low}={options[low]:g} must be positive and below "
                f"{high}={options[high]:g}"
            )
    given = options.get("attention_factor")
    if given is not None and not 0 < given < float("inf"):
        raise ValueError(f"scaling=yarn: attention_factor={given} must be a positive number")
