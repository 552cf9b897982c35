"""RoPE, rotary position embedding: q and k are turned by an angle proportional to their position; v is left alone.

    python pos_rope.py           # draws results/rope_rotation.png

Formula: the D channels of a head are D/2 pairs, each a point in a plane, or one complex number z. At position p, pair i
is turned by the angle p·base^(−2i/D):

    z_i  ->  z_i · exp(j · p · base^(−2i/D)),        i = 0 … D/2 − 1

Turning q by m steps and k by n steps changes the angle between them by m − n steps, so the score q·k depends on the
distance m − n and on no absolute position. Pair 0 makes a turn every 2π tokens, the last pair one in nearly 2π·base.
Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".

Past the trained length L0 the slow pairs reach angles that training never showed. Scaling by s = wanted/trained length
brings them back, with the inverse frequencies f_i = base^(−2i/D) changed and nothing else:

    linear    f_i / s: position interpolation (Chen et al. 2023, arXiv:2306.15595)
    ntk       base · s^(D/(D−2)) for base: the fastest pair as it was, the slowest f/s ("NTK-aware", bloc97 2023)
    dynamic   ntk with s·n/L0 − s + 1 for s, n the current length: unchanged up to L0 (emozilla 2023)
    yarn      pairs with over beta_fast turns in L0 keep f, under beta_slow turns get f/s, a ramp over i between them; cos
              and sin are multiplied by 0.1·ln s + 1 (Peng et al. 2023, arXiv:2309.00071)
    llama3    pairs with over high_freq_factor turns in L0 keep f, under low_freq_factor turns get f/s, a ramp over the
              number of turns between them (Llama 3.1, arXiv:2407.21783)

Notation: B batch, H heads, T tokens, C = dim the model width, D = C/H the head width.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


SCALINGS = {  # kind: its options beside factor and trained_len, and their defaults
    "none": {}, "linear": {}, "ntk": {}, "dynamic": {},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def rope_frequencies(head_dim, base=10000.0, scaling="none", factor=None, trained_len=None, length=None, device="cpu", **options):
    """The inverse frequencies f_i after scaling -> ((D/2,) in float64, the factor on cos and sin: 1 but for yarn).

    scaling      none, linear, ntk, dynamic, yarn or llama3: formulas at the top of this file
    factor       s ≥ 1, wanted over trained length; every scaling needs it
    trained_len  L0; dynamic, yarn and llama3 need it
    length       the current length n; dynamic needs it
    options      yarn: beta_fast=32, beta_slow=1, attention_factor=0.1·ln s + 1; llama3: low_freq_factor=1, high_freq_factor=4
    Float32 on MPS, which has no float64.
    ValueError: odd or non-positive head_dim, base ≤ 0, an unknown scaling or option, a factor or trained_len that is missing, a
    value that is impossible or contradicts another.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head width {head_dim}: must be even and at least 2, since channels are turned in pairs")
    if not 0 < base < float("inf"):
        raise ValueError(f"base={base}: must be a positive number")
    options = _checked(head_dim, base, scaling, factor, trained_len, options)
    if scaling == "dynamic" and (length is None or not 0 <= length < float("inf")):
        raise ValueError(f"scaling=dynamic: length={length} must be the current length, a number of at least 0")
    exact = torch.float32 if torch.device(device).type == "mps" else torch.float64
    pair = torch.arange(0, head_dim, 2, dtype=exact, device=device)  # 2i, (D/2,)
    if scaling in ("ntk", "dynamic"):
        s = factor if scaling == "ntk" else factor * max(length, trained_len) / trained_len - factor + 1
        base = base * s ** (head_dim / (head_dim - 2))
    inverse = base ** (-pair / head_dim)
    if scaling == "linear":
        return inverse / factor, 1.0
    if scaling == "yarn":
        pair_of = lambda turns: head_dim * math.log(trained_len / (2 * math.pi * turns)) / (2 * math.log(base))
        low, high = max(math.floor(pair_of(options["beta_fast"])), 0), min(math.ceil(pair_of(options["beta_slow"])), head_dim - 1)
        ramp = ((pair / 2 - low) / (high - low or 0.001)).clamp(0, 1)
        attention_factor = 0.1 * math.log(factor) + 1 if options["attention_factor"] is None else options["attention_factor"]
        return inverse / factor * ramp + inverse * (1 - ramp), attention_factor
    if scaling == "llama3":
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        keep = ((trained_len * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return inverse * keep + inverse / factor * (1 - keep), 1.0
    return inverse, 1.0


def _checked(head_dim, base, scaling, factor, trained_len, options):
    """The options of a scaling with their defaults. ValueError for what rope_frequencies says."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling}: must be one of {', '.join(SCALINGS)}")
    for key in options:
        if key not in SCALINGS[scaling]:
            raise ValueError(f"scaling={scaling} has no option {key}; it has {', '.join(SCALINGS[scaling]) or 'none'}")
    if scaling == "none":
        if factor is not None:
            raise ValueError(f"factor={factor:g} without a scaling; give scaling=linear, ntk, dynamic, yarn or llama3 as well")
        return {}
    if factor is None or not 1 <= factor < float("inf"):
        raise ValueError(f"scaling={scaling}: factor={factor} must be a number of at least 1, wanted over trained length")
    if (trained_len is None and scaling in ("dynamic", "yarn", "llama3")) or (
            trained_len is not None and not (1 <= trained_len < float("inf") and trained_len == int(trained_len))):
        raise ValueError(f"scaling={scaling}: trained_len={trained_len} must be a whole number of at least 1")
    if scaling in ("ntk", "dynamic") and head_dim == 2:
        raise ValueError(f"scaling={scaling}: head width 2 has one pair, and the fastest pair is never scaled; must be at least 4")
    if scaling == "yarn" and base <= 1:
        raise ValueError(f"scaling=yarn: base={base} must be above 1")
    options = SCALINGS[scaling] | options
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        if low in options and not 0 < options[low] < options[high] < float("inf"):
            raise ValueError(f"scaling={scaling}: {low}={options[low]:g} must be positive and below {high}={options[high]:g}")
    given = options.get("attention_factor")
    if given is not None and not 0 < given < float("inf"):
        raise ValueError(f"scaling=yarn: attention_factor={given} must be a positive number")
    return options


def rope_cos_sin(positions, head_dim, base=10000.0, **scaling):
    """cos and sin of the angles p·f_i: integer positions (T,) or (B, T) -> two of (T, D/2) or (B, T, D/2).

    Scaling as in rope_frequencies, with the current length (the largest position + 1) for dynamic:
    rope_cos_sin(positions, 32, scaling="yarn", factor=4, trained_len=256).
    Angles are formed in float64 (float32 on MPS, which has no float64) and returned in float32; nothing is cached.
    ValueError: positions that are not integers, and those of rope_frequencies.
    """
    if positions.dtype.is_floating_point or positions.dtype.is_complex or positions.dtype == torch.bool:
        raise ValueError(f"positions are {positions.dtype}; they must be integers")
    length = int(positions.max()) + 1 if scaling.get("scaling") == "dynamic" and positions.numel() else 1
    inverse, factor = rope_frequencies(head_dim, base, length=length, device=positions.device, **scaling)
    angle = positions.to(inverse.dtype)[..., None] * inverse  # (..., T, D/2)
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def apply_rope(x, cos, sin, interleaved=True):
    """Turn every pair of channels of x (B, H, T, D) by its angle; the same turn for every head.

    cos, sin     (T, D/2), or (B, T, D/2) when each sequence has positions of its own
    interleaved  True: pairs are channels (2i, 2i+1), as in the paper; False: (i, i + D/2), the layout of Hugging Face
                 Llama weights. The two differ by a fixed reordering of the channels of q and k.
    Computed in float32 or better; the result has the shape and dtype of x. cos = 1, sin = 0 returns x unchanged.
    ValueError: cos not half as wide as x, or cos with a batch axis for an x without one.
    """
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} channels and cos {cos.shape[-1]}; cos must be half as wide as x")
    if cos.dim() == 3 and x.dim() < 4:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, one table per sequence; x must then be (B, H, T, D), "
                         f"not {tuple(x.shape)}")
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D/2)
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    turn = torch.complex(cos.to(wide), sin.to(wide))  # exp(j·angle)
    if interleaved:
        x = x.to(wide, copy=True)  # in the memory order of x, which spares a reordering
        if x.stride(-1) != 1:
            x = x.contiguous()
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (B, H, T, D/2)
        return torch.view_as_real(z * turn).flatten(-2).to(dtype)
    real, imaginary = x.to(wide).chunk(2, dim=-1)
    z = torch.complex(real, imaginary) * turn
    return torch.cat((z.real, z.imag), dim=-1).to(dtype)


class RoPEAttention(nn.Module):
    """Multi-head self-attention whose q and k are turned by their position.

    dim, n_head   model width C and number of heads H; the head width C/H must be even
    base          wavelengths run from 2π to nearly 2π·base tokens (default 10000)
    interleaved   how channels pair up, see apply_rope (default True)
    causal        True: a token sees itself and what stands before it in the sequence; False: everything
    attend        called as attend(q, k, v, is_causal=…); torch's fused attention unless you hand in another
    scaling, factor, trained_len, and the options of yarn and llama3: see rope_frequencies (default: no scaling)

    forward(x, positions=None): x (B, T, C), integer positions (T,) or (B, T), default 0 … T−1 -> (B, T, C), dtype of x.
    Positions turn q and k; the causal mask goes by order in the sequence. No position parameters, no length limit.
    ValueError: dim not divisible by n_head, odd head width, base ≤ 0, positions of another shape or not integers, and what
    rope_frequencies says of scaling.
    """

    def __init__(self, dim, n_head, base=10000.0, interleaved=True, causal=True, attend=F.scaled_dot_product_attention,
                 scaling="none", factor=None, trained_len=None, beta_fast=None, beta_slow=None, attention_factor=None,
                 low_freq_factor=None, high_freq_factor=None):
        super().__init__()
        if n_head < 1 or dim < 1 or dim % n_head:
            raise ValueError(f"dim={dim} does not divide into n_head={n_head} heads")
        self.n_head, self.head_dim = n_head, dim // n_head
        self.base, self.interleaved, self.causal, self.attend = base, interleaved, causal, attend
        options = dict(scaling=scaling, factor=factor, trained_len=trained_len, beta_fast=beta_fast, beta_slow=beta_slow,
                       attention_factor=attention_factor, low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor)
        self.scaling = {key: value for key, value in options.items() if value is not None}
        rope_cos_sin(torch.arange(1), self.head_dim, base, **self.scaling)  # raises for values that cannot work
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions=None):
        B, T, C = x.shape
        if positions is None:
            positions = torch.arange(T, device=x.device)
        elif positions.shape not in ((T,), (B, T)):
            raise ValueError(f"positions have shape {tuple(positions.shape)}; must be ({T},) or ({B}, {T})")
        cos, sin = rope_cos_sin(positions, self.head_dim, self.base, **self.scaling)  # (T, D/2) or (B, T, D/2)
        qkv = self.qkv(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        q, k = apply_rope(qkv[:2], cos, sin, self.interleaved)  # one pass turns both
        y = self.attend(q, k, qkv[2], is_causal=self.causal)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def draw_rotation(path, head_dim=32, pairs=(0, 2, 4, 8), steps=10):
    """The picture: above, where one vector points at positions 0 … steps − 1; below, that q and k keep their angle."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Arc

    cos, sin = rope_cos_sin(torch.arange(steps), head_dim)  # (steps, D/2)
    degrees = [10000.0 ** (-2 * pair / head_dim) * 180 / torch.pi for pair in pairs]  # per token
    shades = plt.cm.viridis(torch.linspace(0, 0.9, steps).numpy())
    figure, axes = plt.subplots(2, len(pairs), figsize=(2.6 * len(pairs), 6), layout="constrained")

    def arrow(axis, pair, p, label, colour, alpha=1.0, reach=1.2):
        x, y = cos[p, pair].item(), sin[p, pair].item()
        axis.annotate("", (x, y), (0, 0), arrowprops=dict(arrowstyle="->", color=colour, alpha=alpha, lw=1.8, shrinkA=0, shrinkB=0))
        axis.text(reach * x, reach * y, label, color=colour, alpha=alpha, ha="center", va="center", fontsize=10)

    for (top, bottom), pair, turn in zip(axes.T, pairs, degrees):
        for axis in (top, bottom):
            axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="#bbbbbb"))
            axis.set(xlim=(-1.45, 1.6), ylim=(-1.4, 1.4), aspect="equal", xticks=[], yticks=[])
            axis.set_frame_on(False)
        for p in range(steps):  # labels only where they stand apart
            arrow(top, pair, p, str(p) if turn > 15 and p * turn < 350 or p in (0, steps - 1) and turn > 3 else "", shades[p])
        if turn <= 3:
            top.text(1.08, 0.28, f"0 … {steps - 1}", color=shades[steps // 2], fontsize=10)
        top.set_title(f"pair {pair}: {turn:.3g}° per token\none turn in {360 / turn:.3g} tokens", fontsize=11)
        for m, n, alpha, radius in ((3, 1, 1.0, 0.45), (8, 6, 0.4, 0.6)):
            arrow(bottom, pair, m, f"q at {m}" if turn > 3 else "", "#D55E00", alpha, 1.27)
            arrow(bottom, pair, n, f"k at {n}" if turn > 3 else "", "#0072B2", alpha, 1.27)
            bottom.add_patch(Arc((0, 0), 2 * radius, 2 * radius, theta1=n * turn, theta2=m * turn, color="black", alpha=alpha,
                                 lw=1.5))
        bottom.set_title(f"between q and k: {2 * turn:.3g}°, twice", fontsize=11)
    figure.suptitle(f"RoPE: one and the same vector at positions 0, 1, 2, …  (head width {head_dim}, base 10000)", fontsize=12)
    figure.supxlabel("q at 3 and k at 1 (dark), q at 8 and k at 6 (pale): the same distance, the same angle, hence the same score.",
                     fontsize=11)
    figure.savefig(path, dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    from pathlib import Path

    path = Path(__file__).parent / "results" / "rope_rotation.png"
    path.parent.mkdir(exist_ok=True)
    draw_rotation(path)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 32)
    turned = lambda x, position: apply_rope(x, *rope_cos_sin(torch.tensor([position]), 32))
    score = lambda m, n: (turned(q, m) * turned(k, n)).sum()
    print(f"q at 9, k at 2: score {score(9, 2):.5f}    q at 1009, k at 1002: {score(1009, 1002):.5f}    "
          f"q at 9, k at 3: {score(9, 3):.5f}")
    print(f"wrote {path}")
