"""The libraries people would use instead, as models of the same size: `peers(scheme, size)`.

size: dict(dim, n_layer, n_head, train_len). Every model maps ids (B, T) to logits (B, T, 256); none has dropout.
"""
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


def peers(scheme, size):
    """{name: (make, attentions)}: make(attention) gives a model with that attention, one of the names in `attentions`."""
    dim, depth, heads, length = size["dim"], size["n_layer"], size["n_head"], size["train_len"]
    token = dict(vocab_size=256, bos_token_id=0, eos_token_id=0)
    layers, wrapper = {
        "learned": ({}, {}),
        "sin": ({}, dict(scaled_sinu_pos_emb=True)),
        "rope": (dict(rotary_pos_emb=True, rotary_emb_dim=dim // heads), dict(use_abs_pos_emb=False)),
        "alibi": (dict(alibi_pos_bias=True), dict(use_abs_pos_emb=False)),
        "none": ({}, dict(use_abs_pos_emb=False))}[scheme]

    def x_transformers(attention):
        decoder = Decoder(dim=dim, depth=depth, heads=heads, attn_dim_head=dim // heads, attn_flash=attention == "fused", **layers)
        return TransformerWrapper(num_tokens=256, max_seq_len=length, attn_layers=decoder, **wrapper)

    def hugging_face(name, **config):
        def make(attention):
            settings = getattr(transformers, name + "Config")(**token, **config)
            settings._attn_implementation = dict(fused="sdpa", plain="eager")[attention]
            return Logits(getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(settings))
        return make

    both = ("fused", "plain")
    found = {"x-transformers": (x_transformers, both)}
    if scheme == "learned":
        found["transformers GPT-2"] = hugging_face("GPT2", n_positions=length, n_embd=dim, n_layer=depth, n_head=heads, resid_pdrop=0,
                                                   embd_pdrop=0, attn_pdrop=0), both
    if scheme == "rope":
        found["transformers Llama"] = hugging_face("Llama", hidden_size=dim, intermediate_size=8 * dim // 3, num_hidden_layers=depth,
                                                   num_attention_heads=heads, max_position_embeddings=length), both
    if scheme == "alibi":
        found["transformers BLOOM"] = hugging_face("Bloom", hidden_size=dim, n_layer=depth, n_head=heads), ("plain",)
        found["transformers MPT"] = hugging_face("Mpt", d_model=dim, n_layers=depth, n_heads=heads, max_seq_len=length), ("plain",)
    return found


class Logits(torch.nn.Module):
    """A transformers model that gives the logits alone and keeps no cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits
