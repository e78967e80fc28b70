"""A second embedding, from which every layer adds its part, as Gemma 3n and 4 have it."""

from __future__ import annotations

from collections.abc import Mapping

from worker.convert.family.sizes import EMBD, LAYERS, VOCAB, Shape, size

MODEL = "per_layer_token_embd? per_layer_model_proj? per_layer_proj_norm?"
LAYER = "inp_gate? proj? post_norm?"
_WIDTH = size("per_layer")
SHAPES: Mapping[str, Shape] = {
    "per_layer_token_embd": (VOCAB, LAYERS * _WIDTH),
    "per_layer_model_proj": (LAYERS * _WIDTH, EMBD),
    "per_layer_proj_norm": (_WIDTH,),
    "inp_gate": (_WIDTH, EMBD),
    "proj": (EMBD, _WIDTH),
}
