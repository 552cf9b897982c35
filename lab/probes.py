"""What looks into a model: its attention by distance, its hidden states, where its loss breaks."""

import numpy as np
import torch

from lab.score import K


def attention_by_distance(model, ids, queries=K, read=None):
    """Attention weights of the last `queries` tokens by distance: ids (B, n) -> (n,).

    The mean over sequences, tokens, heads and blocks; entry d is the weight of the token d before
    the query. read: what to call in place of the model, as Run.read_by gives it. ValueError if an
    attention layer of the scheme does not call an `attend` of its own.
    """
    layers = [block.attention for block in model.blocks]
    blind = [layer for layer in layers if not callable(getattr(layer, "attend", None))]
    if blind:
        raise ValueError(_unseen(model))
    watches = [_Watch(layer.attend, model.window, queries) for layer in layers]
    try:
        for layer, watch in zip(layers, watches):
            layer.attend = watch
        with torch.no_grad():
            (read or model)(ids)
    finally:
        for layer, watch in zip(layers, watches):
            layer.attend = watch.attend
    found = [weights for watch in watches for weights in watch.found]
    if not found:
        raise ValueError(_unseen(model))
    return torch.stack(found).mean(0).cpu().numpy()


def _unseen(model):
    return (
        f"scheme '{model.scheme.text}': its attention weights cannot be seen, because its layers "
        "do not call a `self.attend`"
    )


class _Watch:
    """Stands in for the `attend` of a layer, and keeps its weights by distance."""

    def __init__(self, attend, window, queries):
        self.attend, self.window, self.queries, self.found = attend, window, queries, []

    def __call__(self, q, k, v, attn_mask=None, **options):
        window = options.get("window", self.window)
        scale, bias = options.get("scale"), options.get("bias")
        self.found.append(self._by_distance(q, k, attn_mask, scale, window, bias))
        return self.attend(q, k, v, attn_mask=attn_mask, **options)

    def _by_distance(self, q, k, attn_mask, scale, window, bias):
        """q, k (B, H, n, D), and the rest as attend.attend takes it -> weights (n,)."""
        n, queries = q.shape[-2], min(self.queries, q.shape[-2])
        first, scale = n - queries, q.shape[-1] ** -0.5 if scale is None else scale
        scores = (q[..., first:, :] @ k.transpose(-1, -2)).float() * scale  # (B, H, queries, n)
        if bias is not None:
            scores = scores + bias(first, n, 0, n).to(q.dtype)
        token = torch.arange(n, device=q.device)
        distance = token[first:, None] - token  # (queries, n)
        hidden = (distance < 0) | (distance >= (window or n))
        if attn_mask is not None:
            mask = attn_mask.expand(*attn_mask.shape[:-2], n, n)[..., first:, :]
            if mask.dtype == torch.bool:
                hidden = hidden | ~mask
            else:
                scores = scores + mask
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean(dim=(0, 1))
        by_distance = torch.zeros(queries, n, device=q.device)
        return by_distance.scatter_add_(1, distance.clamp(min=0), weights).mean(0)


def hidden_states(model, ids):
    """The residual stream before the first block and after each: ids (B, T) -> [(B, T, C)]."""
    states = []

    def keep_input(block, inputs):
        states.append(inputs[0])

    def keep_output(block, inputs, output):
        states.append(output)

    hooks = [model.blocks[0].register_forward_pre_hook(keep_input)]
    hooks += [block.register_forward_hook(keep_output) for block in model.blocks]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def probe(train, test):
    """How well a linear map reads the position from hidden states (B, T, C) -> R² on `test`.

    Ridge regression of t on h_t, fitted on `train`. 1 is perfect; 0 is what the mean position
    gives, whatever the state.
    """
    x, y = _states_and_positions(train)
    scale = x[:, :-1].std(0).mean()
    ridge = 1e-3 * len(x) * scale**2 * torch.eye(x.shape[1], dtype=torch.double)
    ridge[-1, -1] = 0
    weight = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
    x, y = _states_and_positions(test)
    return float(1 - (x @ weight - y).square().sum() / (y - y.mean()).square().sum())


def _states_and_positions(states):
    """States (B, T, C) -> (B·T, C + 1), the last column 1, and their positions (B·T,)."""
    x = states.double().flatten(0, 1)
    ones = torch.ones(len(x), 1, dtype=torch.double)
    positions = torch.arange(states.shape[1]).double().repeat(len(states))
    return torch.cat((x, ones), 1), positions


def count_model_ppl(train, val, bytes_back):
    """Perplexity on val of counting in train which byte follows which (bytes_back 1), or how often
    each occurs (0). One is added to every count.
    """

    def before(text):
        return text[:-1].astype(np.int64) if bytes_back else np.zeros(len(text) - 1, np.int64)

    counts = np.ones((256, 256))
    np.add.at(counts, (before(train), train[1:]), 1)
    chance = counts / counts.sum(1, keepdims=True)
    return float(np.exp(-np.log(chance[before(val), val[1:]]).mean()))


def first_break(nats, L, level):
    """The first position past L from which the mean of 32 losses is over 1.1 times the level.

    nats (n,) by position; None if there is no such position.
    """
    for start in range(L, len(nats) - 31):
        if nats[start : start + 32].mean() > 1.1 * level:
            return start
    return None
