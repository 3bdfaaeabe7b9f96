"""Llama, Mistral and Qwen in Hugging Face's layout: what toolbox/weights.py must know of them."""
import math

from toolbox.validate import at_least_1, one_of
from toolbox.weights import check_fixed

KINDS = ("llama", "mistral", "qwen2", "qwen3")   # model_type in config.json
# As in toolbox/weights.py: our names for sizes and theirs; settings with the values supported
SIZES = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size",
         "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
         "ffn": "intermediate_size"}
FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
         "use_sliding_window": (False,), "quantization_config": (None,)}
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings")
NAMES = {
    "model.embed_tokens.": "wte.", "model.layers.": "h.", "model.norm.": "ln_f.",
    "input_layernorm.": "ln_1.", "post_attention_layernorm.": "ln_2.", "self_attn.": "attn.",
    "q_proj.": "query.", "k_proj.": "key.", "v_proj.": "value.", "o_proj.": "c_proj.",
    "gate_proj.": "c_gate.", "up_proj.": "c_fc.", "down_proj.": "c_proj.",
}


def llama_names(key, tensor):
    """A tensor of a file under our name. None for the angles in old files: they are computed."""
    if key.endswith(".inv_freq"):
        return {}
    for theirs, ours in NAMES.items():
        key = key.replace(theirs, ours)
    return {key: tensor}


def llama_config(theirs):
    """LlamaConfig's arguments. ValueError or KeyError for what is missing or not supported."""
    kind, tied = theirs["model_type"], theirs.get("tie_word_embeddings", False)
    check_fixed(theirs, FIXED)
    one_of("tie_word_embeddings", tied, True, False)
    if kind == "mistral":
        one_of("sliding_window", theirs.get("sliding_window", 4096), None)
    at_least_1(**{key: theirs[key] for key in SIZES.values()})
    heads = theirs["num_attention_heads"]
    size = theirs.get("head_dim") or theirs["hidden_size"] // heads
    groups = theirs.get("num_key_value_heads") or heads
    at_least_1(head_dim=size, num_key_value_heads=groups)
    if size % 2:   # features turn in pairs
        raise ValueError(f"head_dim {size} must be even; by default it is "
                         "hidden_size / num_attention_heads")
    if heads % groups:
        raise ValueError(f"num_key_value_heads {groups} must divide num_attention_heads {heads}")
    return {ours: theirs[key] for ours, key in SIZES.items()} | rope(theirs) | {
        "norm_eps": above_0(theirs, "rms_norm_eps"), "n_kv_head": groups, "head_size": size,
        "qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3", "tied": tied}


def rope(theirs):
    """rope_theta, and rope_scaling if there is one. It may stand in either of two places."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_scaling must be an object, not {given!r:.60}")
    kind = given.get("rope_type", given.get("type", "default"))   # "type": its old name
    one_of("rope_type", kind, "default", "llama3")
    found = {"rope_theta": above_0({"rope_theta": 10000.0} | theirs | given, "rope_theta")}
    if kind == "llama3":
        found["rope_scaling"] = tuple(above_0(given, key) for key in ROPE_SCALING)
    return found


def above_0(theirs, key):
    value = theirs[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number above 0, not {value!r:.60}")
    return value
