"""Llama, Mistral and Qwen in Hugging Face's layout: what toolbox/weights.py must know of them."""
import math

from toolbox.validate import at_least_1, is_number, one_of
from toolbox.weights import check_fixed

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")   # in config.json
# As in toolbox/weights.py: our names for sizes and theirs; settings with the values supported
SIZES = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size",
         "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
         "ffn": "intermediate_size"}
FIXED = {"hidden_act": ("silu", "swish"), "attention_bias": (False, True),   # swish: SiLU's name
         "mlp_bias": (False, True), "tie_word_embeddings": (False, True),    # before it had one
         "partial_rotary_factor": (1.0,), "use_sliding_window": (False,)}
CONTEXT = "original_max_position_embeddings"   # before Llama 3.1's scaling made it longer
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", CONTEXT)
# What transformers takes for a key that config.json lacks. The other sizes must stand there.
DEFAULTS = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}}
TOP = {"embed_tokens.": "wte.", "layers.": "h.", "norm.": "ln_f."}   # how names begin
NAMES = {
    "input_layernorm.": "ln_1.", "post_attention_layernorm.": "ln_2.", "self_attn.": "attn.",
    "q_proj.": "query.", "k_proj.": "key.", "v_proj.": "value.", "o_proj.": "c_proj.",
    "gate_proj.": "c_gate.", "up_proj.": "c_fc.", "down_proj.": "c_proj.",
}


def llama_names(key, tensor):
    """A tensor of a file under our name; no angles of old files, as they are computed."""
    if key.endswith(".inv_freq"):
        return {}
    key = key.removeprefix("model.")   # AutoModel saves without it
    for theirs, ours in TOP.items():
        if key.startswith(theirs):
            key = ours + key.removeprefix(theirs)
    for theirs, ours in NAMES.items():
        key = key.replace(theirs, ours)
    return {key: tensor}


def llama_config(theirs):
    """LlamaConfig's arguments. ValueError or KeyError for what is missing or not supported."""
    kind = theirs["model_type"]
    theirs = {"rms_norm_eps": 1e-6} | DEFAULTS[kind] | theirs
    given = rope_given(theirs)
    at_least_1(**{key: theirs[key] for key in SIZES.values()})
    check_fixed(theirs | given, FIXED)
    layers = theirs.get("layer_types")
    for each in layers if isinstance(layers, list) else [layers]:
        one_of("layer_types", each, None, "full_attention")
    if kind in ("llama", "mistral"):
        default = 4096 if kind == "mistral" else None
        one_of("sliding_window", theirs.get("sliding_window", default), None)
    heads = theirs.get("num_attention_heads")
    size = theirs.get("head_dim")
    if size is None:
        size = theirs["hidden_size"] // heads
    groups = theirs.get("num_key_value_heads")
    if groups is None:
        groups = heads
    at_least_1(head_dim=size, num_key_value_heads=groups)
    if size % 2:   # features turn in pairs
        raise ValueError(f"head_dim {size} must be even; by default it is "
                         "hidden_size / num_attention_heads")
    if heads % groups:
        raise ValueError(f"num_key_value_heads {groups} must divide num_attention_heads {heads}")
    biased = kind in ("llama", "qwen3") and theirs.get("attention_bias", False)
    sizes = {ours: theirs[key] for ours, key in SIZES.items()}
    return {
        **sizes,
        **rope(theirs, given),
        "norm_eps": above_0(theirs, "rms_norm_eps"),
        "n_kv_head": groups,
        "head_size": size,
        "qkv_bias": biased or kind == "qwen2",
        "out_bias": biased,
        "mlp_bias": kind == "llama" and theirs.get("mlp_bias", False),
        "qk_norm": kind == "qwen3",
        "tied": theirs.get("tie_word_embeddings", False)}


def rope_given(theirs):
    """What is given about rotary positions. It may stand in either of two places."""
    for key in "rope_scaling", "rope_parameters":   # the old name goes first, as in transformers
        given = theirs.get(key)
        if given is None:
            continue
        is_object = isinstance(given, dict)
        if not is_object or any(isinstance(value, dict) for value in given.values()):   # a layer's
            raise ValueError(f"{key} must be an object of settings, not {given!r:.60}")
    return theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}


def rope(theirs, given):
    """rope_theta, and rope_scaling if there is one."""
    kind = given.get("rope_type", given.get("type", "default"))   # "type": its old name
    one_of("rope_type", kind, "default", "linear", "llama3")
    settings = {"rope_theta": above_0({"rope_theta": 10000.0} | theirs | given, "rope_theta")}
    if kind == "linear":
        settings["rope_scaling"] = (above_0(given, "factor"),)
    if kind == "llama3":
        # as in transformers: what stands at the top of the file goes before what stands inside
        inside = given.get(CONTEXT, theirs["max_position_embeddings"])
        given = given | {CONTEXT: theirs.get(CONTEXT, inside)}
        scaling = tuple(above_0(given, key) for key in ROPE_SCALING)
        _, low, high, _ = scaling
        if low >= high:
            raise ValueError(f"high_freq_factor {high} must be above low_freq_factor {low}")
        settings["rope_scaling"] = scaling
    return settings


def above_0(theirs, key):
    value = theirs[key]
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a number above 0, not {value!r:.60}")
    return value
