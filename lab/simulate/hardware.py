"""
How long a forward pass takes on a GPU, calculated from a data sheet (sheets.json).

    arithmetic = operations of (rows + 85 of a tile) / (share x peak)
    reading    = bytes / (0.85 x bandwidth)
    seconds    = sqrt(arithmetic^2 + reading^2) + engine + all-reduces

A GPU overlaps reading and arithmetic, but never all of it: the root lies between the larger of the
two and their sum. For 3 ms and 4 ms it says 5. A matrix is computed in tiles of many rows, so a
pass over few rows computes most of a tile in vain: of its peak it reaches share x rows / (rows +
85). `share` belongs to a generation of GPUs, 0.58 for Hopper (its clocks fall under full load) and
0.71 for the others. An engine has its time between two passes, for each token that it samples and
for each all-reduce; and its attention may read keys more slowly than matrices.

docs/gpu.md says where the constants come from.
"""
import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

SHEETS = json.loads(Path(__file__).with_name("sheets.json").read_text(encoding="utf-8"))
SHARES = {True: 0.58, False: 0.71}   # of the peak, for Hopper and before
BANDWIDTH_SHARE, LINK_SHARE, TILE = 0.85, 0.45, 85   # TILE: in rows
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GiB = 2**30


@dataclass(frozen=True)
class GPU:
    """A data sheet: operations/s in 16 and 32 bits, bytes/s, bytes, and its link to other GPUs."""
    peak: float
    peak32: float
    bandwidth: float
    memory: float
    link: float = 12e9     # bytes/s each way; the default is PCIe
    hopper: bool = False   # the generation


@dataclass(frozen=True)
class Engine:
    """What an engine adds to the GPU's time, in seconds, and how it plans."""
    overhead: float = 0.75e-3    # between two passes
    per_request: float = 25e-6   # for each sampled token
    all_reduce: float = 30e-6    # for each, two a layer, beside its bytes
    front_end: float = 0.0       # until a request is in its queue: HTTP, tokenization
    ahead: bool = False          # plans a pass while the one before it is computed: loop.py
    keys: float = 0.85           # share of the bandwidth at which keys are read before Hopper


ENGINES = {"plain": Engine(),   # vllm: since 0.14
           "vllm": Engine(all_reduce=7e-6, front_end=7e-3, ahead=True, keys=0.5)}
# peaks of dense matrices with 32-bit accumulation; sheets.json has the memory in GiB
GPUS = {name: GPU(**{**sheet, "memory": sheet["memory"] * GiB})
        for name, sheet in SHEETS["gpus"].items()}


@dataclass(frozen=True)
class Shape:
    """
    What a model's time and memory depend on, in the order of sheets.json. ffn_matrices: 2, or 3 if
    gated. `tp` tensor parallel ranks split heads and FFN, as beyond/tensor_parallel.py does, and
    each holds the vocabulary.
    """
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_size: int
    ffn: int
    ffn_matrices: int
    vocab_size: int
    block_size: int
    tied: bool = False
    size: int = 2   # bytes per number
    tp: int = 1

    def __post_init__(self):
        for name in ("n_head", "n_kv_head", "ffn"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"--tp {self.tp} does not divide {name} {getattr(self, name)}")

    # weights of one rank: of all blocks, of the last projection, and all

    @property
    def blocks(self):
        heads = 2 * self.n_head + 2 * self.n_kv_head   # queries, c_proj; keys, values
        attention = heads * self.n_embd * self.head_size
        mlp = self.ffn_matrices * self.n_embd * self.ffn
        return self.n_layer * (attention + mlp) // self.tp

    @property
    def vocabulary(self):
        return self.n_embd * self.vocab_size

    @property
    def weights(self):
        matrices = 1 if self.tied else 2   # the embedding, and an output head of its own
        return self.blocks + matrices * self.vocabulary

    @property
    def kv_bytes(self):
        """Of the keys and values of a token."""
        return 2 * self.n_layer * self.n_kv_head * self.head_size * self.size // self.tp

    def seconds(self, gpu, *counts):
        """Of a pass, with the engine that is the default; counts: see `seconds`."""
        return seconds(constants(self, gpu), *counts)

    def room(self, gpu, share=0.9):
        """Tokens whose keys and values fit: a share of the memory, less weights and half a GB."""
        room = int((share * gpu.memory - self.weights * self.size - 0.5e9) // self.kv_bytes)
        if room < 1:
            raise ValueError(f"the weights take {self.weights * self.size / GiB:.1f} GiB of each "
                             f"GPU's memory, which has {gpu.memory / GiB:.1f} GiB; an engine uses "
                             f"{share:.0%} of it, and 0.5 GB of that for its passes, so no key "
                             "fits beside the weights")
        return room


MODELS = {name: Shape(*sizes) for name, sizes in SHEETS["models"].items()}


@lru_cache
def constants(shape, gpu, engine=Engine()):
    """Plain numbers for `seconds`: all are seconds."""
    peak = gpu.peak if shape.size == 2 else gpu.peak32
    flop = 1 / (SHARES[gpu.hopper] * peak)
    byte = 1 / (BANDWIDTH_SHARE * gpu.bandwidth)
    key_byte = byte if gpu.hopper else 1 / (engine.keys * gpu.bandwidth)
    features = shape.n_layer * shape.n_head * shape.head_size // shape.tp   # of a token's queries
    reduces = 2 * shape.n_layer if shape.tp > 1 else 0
    sent = 2 * (shape.tp - 1) / shape.tp * shape.n_embd * shape.size   # of a slot, by a ring
    return SimpleNamespace(
        # arithmetic
        row=2 * shape.blocks * flop,
        sample=2 * shape.vocabulary * flop,
        score=4 * features * flop,
        # reading
        weights=shape.blocks * shape.size * byte,
        vocabulary=shape.vocabulary * shape.size * byte,
        key=shape.kv_bytes * key_byte,
        byte=byte,
        # the engine
        slot=reduces * sent / (LINK_SHARE * gpu.link),
        per_request=engine.per_request,
        overhead=engine.overhead + reduces * engine.all_reduce)


def seconds(c, slots, sampled, scores, keys, copied=0):
    """
    Of a pass over `slots` places, after which the engine samples so many tokens. Scores, keys and
    copied bytes: what a layout counts. A copy is a read and a write. c: see `constants`.
    """
    arithmetic = (slots + TILE) * c.row + sampled * c.sample + scores * c.score
    reading = c.weights + (keys + slots) * c.key + 2 * copied * c.byte
    if sampled:
        reading += c.vocabulary
    engine = c.overhead + c.per_request * sampled + c.slot * slots
    return math.hypot(arithmetic, reading) + engine


def gpu_of(text):
    """A GPU by name, or from PEAK_TFLOPS,GB_PER_S,GiB. ValueError for anything else."""
    if text in GPUS:
        return GPUS[text]
    try:
        peak, bandwidth, memory = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--gpu {text}: not PEAK_TFLOPS,GB_PER_S,GiB and none of "
                         f"{', '.join(GPUS)}") from None
    if not all(1e-6 <= number < 1e9 for number in (peak, bandwidth, memory)):
        raise ValueError(f"--gpu {text}: the three numbers must be at least 1e-6 and below 1e9")
    return GPU(peak * 1e12, peak * 1e12, bandwidth * 1e9, memory * GiB)


def shape_of(name, dtype="float16", tp=1):
    """A Shape by name. ValueError for a model that is not in sheets.json."""
    if name not in MODELS:
        raise ValueError(f"--model {name}: none of {', '.join(MODELS)}; for another one, add a "
                         "line to lab/simulate/sheets.json")
    return replace(MODELS[name], size=BYTES[dtype], tp=tp)
