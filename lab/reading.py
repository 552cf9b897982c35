"""How a trained model is read: as it is, past its length in one of its scheme's ways, in a window.

for reading in readings(run, scaling=["none", "yarn"], windows=[0, 256]):
    logits = reader(model, run, reading, n)(ids)
"""

from dataclasses import dataclass

from schemes.scheme import parse_scheme


@dataclass(frozen=True)
class Reading:
    """way: one of the scheme's LONGER ("": as it is); factor: a fixed one in place of n over the
    training length; window: a token sees the last so many only (0: as in the training)."""

    way: str = ""
    factor: float | None = None
    window: int = 0

    def fields(self):
        """The fields of a row."""
        return dict(way=self.way, factor=self.factor, read_window=self.window)


def ways_of(run):
    """The ways in which a run's scheme can be read past its length.

    None for a model of random positions: it has seen larger ones than its length, which then says
    nothing of them.
    """
    return () if run.random_positions else parse_scheme(run.scheme).longer_ways


def readings(run, scaling=("none",), beyond=("untrained",), windows=(0,), factor=None):
    """The wanted readings that the run's scheme has; as it is, if it has none of the ways.

    scaling, beyond   names of ways, among them "none" and "untrained", which both mean as it is
    windows           0 for all of the text
    """
    scaled = [way for way in ways_of(run) if way in scaling]
    policies = [way for way in ways_of(run) if way in beyond]
    as_it_is = not scaled and not policies
    as_it_is |= bool(scaled) and "none" in scaling or bool(policies) and "untrained" in beyond
    found = []
    if as_it_is and 0 in windows:
        found.append(Reading())
    found += [Reading(way, factor if way in scaled else None) for way in scaled + policies]
    limit = run.window or float("inf")
    return found + [Reading(window=window) for window in windows if 0 < window < limit]


def require_scalings(kinds, runs, L):
    """ValueError for a scaling to L that none of the runs takes, or that has nothing to do."""
    taken = {reading.way for run in runs for reading in readings(run, scaling=kinds)}
    before = runs[0].train_len
    for kind in kinds:
        if kind != "none" and kind not in taken:
            raise ValueError(f"--scaling {kind}: none of these schemes takes it")
        if kind != "none" and before >= L:
            raise ValueError(
                f"--scaling {kind}: --train-len {L} must be above the length trained at so far, "
                f"{before}"
            )


def network_of(run, reading, n):
    """The scheme string and the window of the network in which a reading at n takes place."""
    text, L = run.scheme, run.train_len
    wanted = L * reading.factor if reading.factor else n
    if reading.way and (wanted > L or reading.factor):
        text = parse_scheme(text).longer(reading.way, wanted, L)
    window = 0 if reading.window >= n else reading.window
    return text, min(filter(None, (window, run.window)), default=0)


def reader(model, run, reading, n):
    """The model's weights in the network of this reading at n, as ids (B, n) -> logits."""
    scheme, window = network_of(run, reading, n)
    if (scheme, window) != (run.scheme, run.window):
        weight = next(model.parameters())
        other = run.new_model(scheme=scheme, window=window)
        other.load_state_dict(model.state_dict())
        model = other.to(weight.device, weight.dtype).eval()
    return run.read_by(model)


def why_not(error, model, run, n):
    """Why a model could not be read at n, for the note of a row."""
    limit = getattr(model.position, "max_len", None)
    if isinstance(limit, int) and limit < n and not run.random_positions:
        return f"max_len {limit}"
    if isinstance(error, ValueError):
        return str(error)
    if "memory" in str(error):
        return "out of memory"
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
