"""The libraries people would use instead, as models of the same size: `peers(scheme, run)`.

Of the run (lab/runs.py) dim, n_layer, n_head and train_len count. Every model maps ids (B, T) to
logits (B, T, 256); none has dropout.
"""

import functools
import sys

import torch

try:
    import transformers
    from loguru import logger
    from x_transformers import Decoder, TransformerWrapper
except ImportError as error:
    print(f"{error}; first: pip install -r bench/requirements.txt", file=sys.stderr)
    sys.exit(2)

logger.disable("x_transformers")
transformers.logging.set_verbosity_error()

TOKENS = dict(vocab_size=256, bos_token_id=0, eos_token_id=0)
FUSED, PLAIN = "fused", "plain"  # torch's fused attention, or the library's own products


def peers(scheme, run):
    """{name: (make, attentions)}: make(attention) -> a model with one of those attentions."""
    libraries = {"x-transformers": (x_transformers, (FUSED, PLAIN))} | HUGGING_FACE[scheme]
    return {
        name: (functools.partial(make, scheme, run), attentions)
        for name, (make, attentions) in libraries.items()
    }


def x_transformers(scheme, run, attention):
    head_dim = run.dim // run.n_head
    layers, wrapper = {
        "learned": ({}, {}),
        "sin": ({}, dict(scaled_sinu_pos_emb=True)),
        "rope": (dict(rotary_pos_emb=True, rotary_emb_dim=head_dim), dict(use_abs_pos_emb=False)),
        "alibi": (dict(alibi_pos_bias=True), dict(use_abs_pos_emb=False)),
        "none": ({}, dict(use_abs_pos_emb=False)),
    }[scheme]
    decoder = Decoder(
        dim=run.dim,
        depth=run.n_layer,
        heads=run.n_head,
        attn_dim_head=head_dim,
        attn_flash=attention == FUSED,
        **layers,
    )
    return TransformerWrapper(
        num_tokens=256, max_seq_len=run.train_len, attn_layers=decoder, **wrapper
    )


def gpt2(scheme, run, attention):
    config = transformers.GPT2Config(
        n_positions=run.train_len,
        n_embd=run.dim,
        n_layer=run.n_layer,
        n_head=run.n_head,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **TOKENS,
    )
    return hugging_face(transformers.GPT2LMHeadModel, config, attention)


def llama(scheme, run, attention):
    config = transformers.LlamaConfig(
        hidden_size=run.dim,
        intermediate_size=8 * run.dim // 3,
        num_hidden_layers=run.n_layer,
        num_attention_heads=run.n_head,
        max_position_embeddings=run.train_len,
        **TOKENS,
    )
    return hugging_face(transformers.LlamaForCausalLM, config, attention)


def bloom(scheme, run, attention):
    config = transformers.BloomConfig(
        hidden_size=run.dim, n_layer=run.n_layer, n_head=run.n_head, **TOKENS
    )
    return hugging_face(transformers.BloomForCausalLM, config, attention)


def mpt(scheme, run, attention):
    config = transformers.MptConfig(
        d_model=run.dim,
        n_layers=run.n_layer,
        n_heads=run.n_head,
        max_seq_len=run.train_len,
        **TOKENS,
    )
    return hugging_face(transformers.MptForCausalLM, config, attention)


def hugging_face(model, config, attention):
    config._attn_implementation = {FUSED: "sdpa", PLAIN: "eager"}[attention]
    return Logits(model(config))


HUGGING_FACE = {
    "learned": {"transformers GPT-2": (gpt2, (FUSED, PLAIN))},
    "sin": {},
    "rope": {"transformers Llama": (llama, (FUSED, PLAIN))},
    "alibi": {"transformers BLOOM": (bloom, (PLAIN,)), "transformers MPT": (mpt, (PLAIN,))},
    "none": {},
}


class Logits(torch.nn.Module):
    """A transformers model that gives the logits alone and keeps no cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits
