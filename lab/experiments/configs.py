"""Which settings of a config.json are served: a table that asks the code which reads them."""
import json
from itertools import groupby

from lab.experiments.results import Table
from lab.loading.load import KINDS

GPT2 = {"vocab_size": 1024, "n_layer": 2, "n_head": 8, "n_embd": 512, "n_positions": 2048}
LLAMA = {"vocab_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512,
         "intermediate_size": 1024, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
         "sliding_window": None}
WHOLE, TRUTH = (2048, "2048", 2048.0, None), (True, False, None)
ROPE = (None, *({"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 512}
                for kind in ("default", "linear", "llama3", "dynamic", "yarn", "longrope")))
BOTH = {"tie_word_embeddings": TRUTH, "quantization_config": (None, {"bits": 4}),
        "dtype": ("float32", "bfloat16")}
ASKED_OF_GPT2 = {   # the values that are tried
    "n_positions": WHOLE, "n_inner": (None, 2048, 1024),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
    "layer_norm_epsilon": (1e-5, 1e-6), "scale_attn_weights": TRUTH,
    "scale_attn_by_inverse_layer_idx": TRUTH, "reorder_and_upcast_attn": (True, False),
    "add_cross_attention": TRUTH, "resid_pdrop": (0.0, 0.1), **BOTH}
ASKED_OF_LLAMA = {
    "max_position_embeddings": WHOLE, "num_key_value_heads": (None, 8, 2, 3, 0, "2"),
    "head_dim": (None, 64, 32, 33, 0), "hidden_act": ("silu", "swish", "gelu"),
    "attention_bias": TRUTH, "mlp_bias": TRUTH, "rms_norm_eps": (1e-5, 1e-6, "1e-6", None),
    "rope_theta": (1e4, 5e5, "1e4", None), "rope_scaling": ROPE, "rope_parameters": ROPE,
    "partial_rotary_factor": (1.0, 0.5), "sliding_window": (None, 4096),
    "use_sliding_window": TRUTH, "layer_types": (None, ["full_attention"], ["sliding_attention"]),
    "attention_dropout": (0.0, 0.1), **BOTH}


def outcome(kind, key, values):
    """What is served, and what is refused, in words."""
    said, made = {False: [], True: []}, []
    for value in values:
        try:
            made.append(KINDS[kind]((GPT2 if kind == "gpt2" else LLAMA) | {
                "model_type": kind, key: value}))
            served = True
        except ValueError:
            served = False
        rope = isinstance(value, dict) and value.get("rope_type")
        said[served].append(f"`{rope or json.dumps(value)}`")
    if len(made) > 1 and all(each == made[0] for each in made) and said[False] in ([], ["`null`"]):
        return "no effect", ", ".join(said[False])
    return tuple(", ".join(said[served]) for served in (True, False))


def table():
    rows = []
    for asked, kinds in (ASKED_OF_GPT2, ["gpt2"]), (ASKED_OF_LLAMA, [*KINDS][1:]):
        for key, values in asked.items():
            found = sorted((outcome(kind, key, values), kind) for kind in kinds)
            rows += [[f"`{key}`", ", ".join(kind for _, kind in group), *what]
                     for what, group in groupby(found, lambda each: each[0])]
    return Table(["key", "model_type", "served", "refused"], rows, words=4)
