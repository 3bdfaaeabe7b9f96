"""
How long a forward pass takes on a GPU, calculated from a data sheet (sheets.json).

    arithmetic = operations of (rows + 85 of a tile) / (share x peak)
    reading    = bytes / (0.85 x bandwidth)
    seconds    = sqrt(arithmetic^2 + reading^2) + engine + all-reduces

A GPU overlaps reading and arithmetic, but never all of it: the root lies between the larger of the
two and their sum. For 3 ms and 4 ms it says 5. A matrix is computed in tiles of many rows, so a
pass over few rows computes most of a tile in vain: of its peak it reaches share x rows / (rows +
85). `share` belongs to a generation of GPUs, 0.58 for Hopper (its clocks fall under full load) and
0.71 for the others. What belongs to an engine is in `Engine`.

These constants were chosen on one half of the published runs and tested on the other:
lab/simulate/published.py and lab/simulate/real.py.
"""
import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

SHEETS = json.loads(Path(__file__).with_name("sheets.json").read_text(encoding="utf-8"))
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
    link: float = 12e9    # bytes/s each way; the default is PCIe
    share: float = 0.71   # of the peak, in a pass of many rows


@dataclass(frozen=True)
class Engine:
    """The time that an engine adds to the GPU's, in seconds, and how it plans."""
    overhead: float = 0.75e-3     # between two passes
    per_request: float = 25e-6    # for each sampled token
    all_reduce: float = 30e-6     # for each, beside its bytes; there are two in a layer
    front_end: float = 0.0        # from a request's arrival to the scheduler: HTTP, tokenization
    ahead: bool = False           # plans a pass while the one before it is computed


# peaks of dense matrices with 32-bit accumulation; sheets.json has the memory in GiB
GPUS = {name: GPU(**{**sheet, "memory": sheet["memory"] * GiB})
        for name, sheet in SHEETS["gpus"].items()}
ENGINES = {name: Engine(**constants) for name, constants in SHEETS["engines"].items()}


@dataclass(frozen=True)
class Price:
    """Seconds that a pass takes: plain numbers, which `price` makes of a model, GPU and engine."""
    row: float          # arithmetic of a slot; all are seconds
    sampled: float      # arithmetic of the vocabulary, for each sampled token
    score: float        # arithmetic of a score
    weights: float      # reading those of the blocks
    vocabulary: float   # reading that of the last projection
    key: float          # reading or writing a token's keys and values
    byte: float         # reading or writing a byte that is copied
    overhead: float     # of the engine, and of the all-reduces but for their bytes
    per_request: float  # of the engine, for each sampled token
    sent: float         # by all-reduces, for each slot
    expert_row: float   # arithmetic of a row in one expert of every layer
    expert: float       # reading one expert of every layer
    experts: int        # in a layer; 0: none
    active: int         # of these, for each slot

    def seconds(self, slots, sampled, scores, keys, copied=0):
        """
        Of a pass over `slots` places, after which the engine samples so many tokens. Scores, keys
        and copied bytes: what a layout counts. A copy is a read and a write.

        Of E experts, a slot needs k, and which is chance: n slots miss one with (1 - k / E)^n. All
        that are hit are read. Each computes a share of the n k rows, and a tile of its own.
        """
        arithmetic = (slots + TILE) * self.row + sampled * self.sampled + scores * self.score
        reading = self.weights + (keys + slots) * self.key + 2 * copied * self.byte
        if sampled:
            reading += self.vocabulary
        if self.experts:
            hit = self.experts * (1 - (1 - self.active / self.experts) ** slots)
            arithmetic += (slots * self.active + hit * TILE) * self.expert_row
            reading += hit * self.expert
        return (math.hypot(arithmetic, reading) + self.overhead + self.per_request * sampled
                + self.sent * slots)


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
    experts: int = 0   # FFNs in a layer of a mixture of experts, of which each token uses `active`
    active: int = 0
    size: int = 2      # bytes per number
    tp: int = 1

    def __post_init__(self):
        for name in ("n_head", "n_kv_head", "ffn"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"--tp {self.tp} does not divide {name} {getattr(self, name)}")

    # of one rank

    @property
    def expert(self):   # weights of an FFN in all layers
        return self.n_layer * self.ffn_matrices * self.n_embd * self.ffn // self.tp

    @property
    def linears(self):   # weights of the blocks that every token uses
        attention = 2 * self.n_embd * self.head_size * (self.n_head + self.n_kv_head)
        return self.n_layer * attention // self.tp + (0 if self.experts else self.expert)

    @property
    def vocabulary(self):   # weights of the last projection
        return self.n_embd * self.vocab_size

    @property
    def weights(self):   # all of them, the embedding too
        return (self.linears + self.experts * self.expert
                + self.vocabulary * (1 if self.tied else 2))

    @property
    def kv_bytes(self):   # keys and values of a token
        return 2 * self.n_layer * self.n_kv_head * self.head_size * self.size // self.tp

    def seconds(self, gpu, *counts):
        """Of one pass, with the engine that is the default; counts: see Price.seconds."""
        return price(self, gpu).seconds(*counts)

    def room(self, gpu, share=0.9):
        """Tokens whose keys and values fit: a share of the memory, less weights and half a GB."""
        room = int((share * gpu.memory - self.weights * self.size - 0.5e9) // self.kv_bytes)
        if room < 1:
            raise ValueError(f"the weights take {self.weights * self.size / GiB:.1f} GiB of each "
                             f"GPU's memory, which has {gpu.memory / GiB:.1f} GiB")
        return room


MODELS = {name: Shape(*sizes) for name, sizes in SHEETS["models"].items()}


@lru_cache
def price(shape, gpu, engine=Engine()):
    """
    The Price of a model's passes. A ring's all-reduce sends 2 (tp - 1) / tp times the tensor, twice
    a layer.
    """
    flop = 1 / (gpu.share * (gpu.peak if shape.size == 2 else gpu.peak32))
    byte = 1 / (BANDWIDTH_SHARE * gpu.bandwidth)
    width = shape.n_layer * shape.n_head * shape.head_size // shape.tp   # features of its heads
    reduces = 2 * shape.n_layer if shape.tp > 1 else 0
    ring = 2 * (shape.tp - 1) / shape.tp * shape.n_embd * shape.size
    return Price(
        row=2 * shape.linears * flop, sampled=2 * shape.vocabulary * flop, score=4 * width * flop,
        weights=shape.linears * shape.size * byte, vocabulary=shape.vocabulary * shape.size * byte,
        key=shape.kv_bytes * byte, byte=byte,
        overhead=engine.overhead + reduces * engine.all_reduce, per_request=engine.per_request,
        sent=reduces * ring / (LINK_SHARE * gpu.link), expert_row=2 * shape.expert * flop,
        expert=shape.expert * shape.size * byte, experts=shape.experts, active=shape.active)


def gpu_of(text):
    """A GPU by name, or from PEAK_TFLOPS,GB_PER_S,GiB. ValueError for anything else."""
    if text in GPUS:
        return GPUS[text]
    try:
        peak, bandwidth, memory = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--gpu {text}: not PEAK_TFLOPS,GB_PER_S,GiB and none of "
                         f"{', '.join(GPUS)}") from None
    if not all(0 < number < 1e9 for number in (peak, bandwidth, memory)):
        raise ValueError(f"--gpu {text}: the three numbers must be above 0 and below 1e9")
    return GPU(peak * 1e12, peak * 1e12, bandwidth * 1e9, memory * GiB)


def shape_of(name, dtype="float16", tp=1):
    """A Shape by name. ValueError for a model that is not in sheets.json."""
    if name not in MODELS:
        raise ValueError(f"--model {name}: none of {', '.join(MODELS)}; for another one, add a "
                         "line to lab/simulate/sheets.json")
    return replace(MODELS[name], size=BYTES[dtype], tp=tp)
